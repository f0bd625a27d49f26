"""CUDA graphs of one executor: one for each profile and cache window, over the executor's addresses."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.gpu import GpuDriver

_log = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """What a recorded step depends on besides the contents of memory: a fixed profile has one size of everything."""

    profile: int
    first_row: int


class GraphPool:
    """Recorded steps by key."""

    def __init__(self, driver: GpuDriver, *, enabled: bool) -> None:
        self.enabled = enabled  # False from the first failure on: recording is an optimization, steps run without it
        self.replays = 0  # steps that were replayed
        self._driver = driver
        self._graphs: dict[GraphKey, int] = {}

    @property
    def keys(self) -> list[GraphKey]:
        """What was recorded, in that order."""
        return list(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def launch(self, key: GraphKey) -> bool:
        """Replay a step; False if it was not recorded."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        self._driver.launch(graph)
        self.replays += 1
        return True

    def record(self, key: GraphKey, enqueue: Callable[[], None], *, capturable: bool = True) -> None:
        """Record the step that ``enqueue`` puts on the stream, after a first run; a failure ends all recording."""
        if not self.enabled or key in self._graphs:
            return
        try:
            if not capturable:
                raise SpecexportError("the engine says that it cannot be recorded.")
            self._graphs[key] = self._capture(enqueue)
        except SpecexportError as error:
            self.enabled = False
            _log.warning("CUDA graphs are off, steps run one kernel at a time: profile %d: %s", key.profile, error)

    def _capture(self, enqueue: Callable[[], None]) -> int:
        self._driver.begin_capture()
        try:
            enqueue()
        except BaseException:
            self._abort()
            raise
        return self._driver.end_capture()

    def _abort(self) -> None:
        """End a recording that failed, so that the stream runs again."""
        with suppress(SpecexportError):  # CUDA has already dropped what it had
            self._driver.free_graph(self._driver.end_capture())

    def close(self) -> None:
        """Forget all graphs."""
        for graph in self._graphs.values():
            self._driver.free_graph(graph)
        self._graphs.clear()
