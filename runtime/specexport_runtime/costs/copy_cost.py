"""Whether a prefix is copied from another row or read again: what a copy takes here, against what a step does.

Measured when an engine is loaded, with half a megabyte or less of its own cache rows, in some milliseconds. What a step
takes comes from the cost curves (``curves``), measured or promised. On most machines a copy is hundreds of times
faster; it is not where a model is so small that reading a few tokens costs less than going through its layers.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specexport_runtime.costs.step_cost import StepCost
from specexport_runtime.executors.base import as_copying, borrows_cache
from specexport_runtime.packing.batch import ModelRunner

MEASURED_BYTES = 1 << 19
_REPEATS = 3


class CopyCost(NamedTuple):
    """Seconds of copying a row's entries, in the caches of all models of an engine.

    Attributes:
        fixed: of a copy, however short.
        each: for each entry.
    """

    fixed: float
    each: float

    def seconds(self, entries: int) -> float:
        """Of so many entries."""
        return self.fixed + self.each * entries


def measure_copy(runners: Seq[ModelRunner], clock: Callable[[], float] = time.perf_counter) -> CopyCost | None:
    """Copy some entries from one row to another, in all models; the fastest of some repeats counts.

    Args:
        runners: the models, with empty rows, of which two are written to.
        clock: seconds; tests bring their own.

    Returns:
        what it takes; None if rows cannot be copied, or there is only one.
    """
    owners = [runner for runner in runners if not borrows_cache(runner.executor)]
    executors = [as_copying(runner.executor) for runner in owners]
    if not owners or None in executors or any(runner.kv.num_rows < 2 for runner in owners):
        return None
    capacity = min(runner.kv.capacity for runner in owners)
    row_bytes = sum(runner.row_bytes(capacity) for runner in owners) or MEASURED_BYTES
    many = max(1, min(capacity, capacity * MEASURED_BYTES // row_bytes))
    for runner in owners:
        runner.swap_rows(0, 1, (many, many))  # both rows are resident now: pages of nothing are copied faster
    fastest = []
    for count in (1, many):
        taken = []
        for _ in range(_REPEATS):
            start = clock()
            for runner in owners:
                runner.copy_row(0, 1, count)
            taken.append(clock() - start)
        fastest.append(min(taken))
    for runner in owners:
        for row in (0, 1):
            runner.executor.clear_row(row)
            runner.give_back(row, 0)
    one, all_of_them = fastest
    each = max(all_of_them - one, 0.0) / max(many - 1, 1)
    return CopyCost(max(one - each, 0.0), each)


def least_copied(copy: CopyCost | None, reading: StepCost | None, least: int, capacity: int) -> int:
    """Fewest tokens that are copied in less time than the target reads them.

    Args:
        copy: what copying takes; None is taken to be nothing.
        reading: steps of the target. What it reads joins a step that there is anyway, so what counts is how much longer
            that step gets. None is taken to be much.
        least: no fewer than these.
        capacity: most tokens of a row.

    Returns:
        the number; ``capacity + 1`` if copying never pays.
    """
    if copy is None or reading is None:
        return least
    alone = reading.seconds(1, 1)
    sizes = range(least, capacity + 1)
    return least + bisect_left(sizes, True, key=lambda n: copy.seconds(n) < reading.seconds(n + 1, 1) - alone)
