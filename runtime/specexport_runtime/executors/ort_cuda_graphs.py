"""CUDA graphs that ONNX Runtime keeps for one executor: which steps get one, and by what number.

A graph is recorded when its number first runs, once by itself and once into the graph; none is given back.
"""

import logging
from collections.abc import Iterable
from typing import Any

from specexport_runtime.abi import StepShape

SPLIT_BOUND = 513
"""Entries from which ONNX Runtime splits the attention of rows of one token. A graph is recorded with or without."""
_MOST_BYTES = 1 << 30
_EAGER = "-1"

_log = logging.getLogger(__name__)


class StepGraphs:
    """Numbers of graphs by the size of a step; where ``optional`` recording fails, steps run without."""

    def __init__(self, ort: Any, *, enabled: bool, optional: bool) -> None:
        self.sizes: dict[StepShape, int] = {}  # what is recorded, with the number of each
        self._ort, self._enabled, self._optional = ort, enabled, optional
        self._takes_more = enabled
        self._recorded: set[tuple[StepShape, bool]] = set()
        self._bytes = self._count = 0

    def add(self, sizes: Iterable[StepShape]) -> list[StepShape]:
        """Record steps of these sizes from now on; returns the sizes that are new."""
        new = [size for size in dict.fromkeys(sizes) if self._takes_more and size not in self.sizes]
        for size in new:
            self._count += 1
            self.sizes[size] = self._count
        return new

    def keep(self, size: StepShape, num_bytes: int) -> bool:
        """Whether a step is recorded, whose memory of ``num_bytes`` is then kept: a graph has its addresses."""
        if size not in self.sizes:
            return False
        if self._bytes + num_bytes > _MOST_BYTES:
            del self.sizes[size]
            return False
        self._bytes += num_bytes
        return True

    def options(self, size: StepShape) -> tuple[Any, Any]:
        """``RunOptions`` of a step: those for few entries, and those from ``SPLIT_BOUND`` entries on."""
        number = self.sizes.get(size)
        ids = (_EAGER, _EAGER) if number is None else (str(2 * number), str(2 * number + 1))
        found = tuple(self._ort.RunOptions() for _ in ids)
        for each, graph_id in zip(found, ids, strict=True):
            if self._enabled:
                each.add_run_config_entry("gpu_graph_id", graph_id)
        return found[0], found[1]

    def note(self, size: StepShape, is_long: bool) -> None:
        """A step has run."""
        if size in self.sizes:
            self._recorded.add((size, is_long))

    def give_up(self, size: StepShape, is_long: bool, error: Exception) -> bool:
        """Whether a step that failed can run without its graph, which was optional: then none is recorded any more."""
        if not self._optional or size not in self.sizes or (size, is_long) in self._recorded:
            return False
        say_graphs_are_off(error)
        self.sizes.clear()
        self._takes_more = False
        return True


def say_graphs_are_off(error: Exception) -> None:
    """The one line of the log."""
    _log.warning("CUDA graphs are off, steps run one kernel at a time: %s", " ".join(str(error).split()))
