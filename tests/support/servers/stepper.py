"""A server that stands still until a test lets it go on: what happens meanwhile does not depend on time."""

import threading
from typing import Any

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.server.config import ServerConfig
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.serving import Served, fake_engine


class Stepper:
    """A server whose target makes a step only when a test lets it.

    Args:
        config: the server's settings.
        rows: sequences that run at a time.
    """

    def __init__(self, config: ServerConfig | None = None, rows: int = 1) -> None:
        self._rows = rows
        self._permits = threading.Semaphore(0)
        self.inside = False
        self._cancelled: set[int] = set()  # requests, since everything ran to its end
        self.served = Served(self._engine, config or ServerConfig(model_name="fake"))
        self.url = self.served.url

    def _engine(self) -> SpecEngine:
        engine = fake_engine(rows=self._rows)
        execute = engine.target.execute

        def step(*args: Any) -> Any:
            self.inside = True
            assert self._permits.acquire(timeout=HANG_S)
            self.inside = False
            return execute(*args)

        cancel = engine._loop.cancel

        def note(request: Any) -> None:
            if request.request.finish_reason is None:
                self._cancelled.add(id(request))
            cancel(request)

        engine.target.execute = step  # type: ignore[method-assign]
        engine._loop.cancel = note  # type: ignore[method-assign]
        return engine

    @property
    def steps(self) -> int:
        """Steps that were made."""
        target = self.served.engine.engine.target
        assert isinstance(target, FakeExecutor)
        return len(target.calls)

    def allow(self, count: int) -> None:
        """Let so many steps be made, now or later."""
        self._permits.release(count)

    def let(self, count: int) -> None:
        """Let so many steps be made, and wait until the next one has begun."""
        until = self.steps + count
        if count:
            self.allow(count)
        wait_until(lambda: self.steps == until and self.inside)

    def wait_until_queued(self, count: int) -> None:
        """Wait until so many requests have come to the decoding thread: its next round knows them."""
        loop = self.served.engine.engine._loop
        wait_until(lambda: len(loop._handles) == count)

    def wait_until_cancelled(self, count: int = 1) -> None:
        """Wait until the server has seen that so many requests have no client any more."""
        wait_until(lambda: len(self._cancelled) >= count)

    def finish(self) -> None:
        """Let everything run to its end."""
        self.allow(10_000)
        self.served.wait_until_idle()
        while self._permits.acquire(blocking=False):
            pass
        self._cancelled.clear()
