"""Work on long texts beside the event loop: a piece at a time, the owners in turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from specexport_runtime.errors import EngineClosedError


class SideWork:
    """A thread for which owners take turns, in order within each; of the event loop that first uses it alone."""

    def __init__(self, name: str) -> None:
        # One thread: each one that tokenizes a long text keeps megabytes of memory for the next.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        # Owners in the order of their turns, and their pieces in that of arrival: a dict keeps both.
        self._waiting: dict[str, dict[asyncio.Future[Any], Callable[[], Any]]] = {}
        self.is_busy = False  # a piece runs, which cannot be stopped
        self._is_closed = False

    def num_waiting(self, owner: str | None) -> int:
        """Pieces that have not begun, of an owner; None for all."""
        return sum(len(pieces) for name, pieces in self._waiting.items() if owner in (None, name))

    def put(self, owner: str, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        """The result of a piece of work. Cancelling it takes the piece back; one that has begun goes on, unheard."""
        if self._is_closed:
            raise _closed()
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[result] = work
        result.add_done_callback(partial(self._remove_piece, owner))
        self._start_next_piece()
        return result

    def drop(self, owner: str, result: "asyncio.Future[Any]") -> None:
        """Cancel a piece if it has not begun."""
        if result in self._waiting.get(owner, ()):
            result.cancel()

    def close(self) -> None:
        """Do nothing more: results of pieces that have not begun are an ``EngineClosedError``."""
        self._is_closed = True
        left, self._waiting = self._waiting, {}
        for result in [each for pieces in left.values() for each in pieces if not each.done()]:
            result.set_exception(_closed())
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _remove_piece(self, owner: str, result: "asyncio.Future[Any]") -> None:
        pieces = self._waiting.get(owner, {})
        if pieces.pop(result, None) is not None and not pieces:
            del self._waiting[owner]

    def _start_next_piece(self) -> None:
        if self.is_busy or not self._waiting:
            return
        owner, pieces = next(iter(self._waiting.items()))
        result, work = next(iter(pieces.items()))
        self._remove_piece(owner, result)
        if self._waiting.pop(owner, None):
            self._waiting[owner] = pieces  # after the others
        self.is_busy = True
        running = asyncio.get_running_loop().run_in_executor(self._thread, lambda: None if result.done() else work())
        running.add_done_callback(partial(self._end, result))

    def _end(self, result: "asyncio.Future[Any]", running: "asyncio.Future[Any]") -> None:
        self.is_busy = False
        error = _closed() if running.cancelled() else running.exception()
        if not result.done() and error is not None:
            result.set_exception(error)
        elif not result.done():
            result.set_result(running.result())
        self._start_next_piece()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closing.", "send the request to another one.")
