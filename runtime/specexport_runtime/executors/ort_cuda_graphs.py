"""CUDA graphs that ONNX Runtime keeps for one executor: which steps get one, and by what number.

A graph is recorded when its number first runs, once by itself and once into the graph; none is given back.
"""

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.gpu import GpuDriver

SPLIT_BOUND = 513
"""Entries from which ONNX Runtime splits the attention of rows of one token. A graph is recorded with or without."""
_EAGER = "-1"

_log = logging.getLogger(__name__)


class StepGraphs:
    """Numbers of graphs by size of step; steps run without where recording is ``optional`` and fails."""

    def __init__(self, ort: Any, driver: GpuDriver, *, enabled: bool, optional: bool, waits: bool) -> None:
        self.sizes: dict[StepShape, int] = {}  # what is recorded, with the number of each
        self._ort, self._driver, self._enabled, self._optional, self._waits = ort, driver, enabled, optional, waits
        self._takes_more = enabled
        self._recorded: set[tuple[StepShape, bool]] = set()
        self._count = 0

    @property
    def has_recorded(self) -> bool:
        """Whether a graph has addresses of memory."""
        return bool(self._recorded)

    def add(self, sizes: Iterable[StepShape]) -> list[StepShape]:
        """Record steps of these sizes from now on; returns the sizes that are new."""
        new = [size for size in dict.fromkeys(sizes) if self._takes_more and size not in self.sizes]
        for size in new:
            self._count += 1
            self.sizes[size] = self._count
        return new

    def options(self, size: StepShape) -> tuple[Any, Any]:
        """``RunOptions`` of a step: those for few entries, and those from ``SPLIT_BOUND`` entries on."""
        number = self.sizes.get(size)
        ids = (_EAGER, _EAGER) if number is None else (str(2 * number), str(2 * number + 1))
        found = tuple(self._ort.RunOptions() for _ in ids)
        for each, graph_id in zip(found, ids, strict=True):
            if self._enabled:
                each.add_run_config_entry("gpu_graph_id", graph_id)
            if not self._waits:
                each.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return found[0], found[1]

    def record_run(self, size: StepShape, is_long: bool) -> None:
        """A step has run."""
        if size in self.sizes:
            self._recorded.add((size, is_long))

    def disable_if_optional(self, size: StepShape, is_long: bool, error: Exception) -> bool:
        """Whether a step that failed can run without its graph, which was optional: then none is recorded any more."""
        if not self._optional or size not in self.sizes or (size, is_long) in self._recorded:
            return False
        log_graphs_off(error)
        with suppress(SpecexportError):  # else the stream goes on recording
            self._driver.free_graph(self._driver.end_capture())
        self.sizes.clear()
        self._takes_more = False
        return True


def log_graphs_off(error: Exception) -> None:
    """The one line of the log."""
    _log.warning("CUDA graphs are off, steps run one kernel at a time: %s", " ".join(str(error).split()))
