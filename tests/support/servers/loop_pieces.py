"""How long an event loop of asyncio is held by one piece of work: between two looks at what else is to do."""

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

LONGEST_PIECE_S = 0.05
"""Seconds of its own thread that a server's event loop may be held."""
_LOOK_S = 0.01


class Piece(NamedTuple):
    """What ran in one go: seconds of its thread, seconds on the clock (others may have had the core), and where."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    where: str = "nothing"


class Pieces:
    """The longest piece of the event loop of one thread, until :meth:`take`."""

    def __init__(self, thread: int) -> None:
        self._thread, self._longest = thread, Piece()
        self._began, self._seen, self._garbage = 0.0, "", 0.0  # of the piece that runs; began 0 between pieces
        self.ended = False

    def run(self, handle: Any, call: Any) -> None:
        """Run a piece."""
        self._seen, self._garbage = "", 0.0
        self._began, cpu = time.perf_counter(), time.thread_time()
        call(handle)
        cpu, wall, self._began = time.thread_time() - cpu, time.perf_counter() - self._began, 0.0
        if cpu > self._longest.cpu_s:
            owner = getattr(handle._callback, "__self__", None)
            name = owner.get_coro().__qualname__ if isinstance(owner, asyncio.Task) else repr(handle)
            self._longest = Piece(cpu, wall, f"{name} ({1e3 * self._garbage:.0f} ms of it garbage){self._seen}")

    def take(self) -> Piece:
        """The piece that took the most of its thread since this was last asked."""
        longest, self._longest = self._longest, Piece()
        return longest

    def watch(self) -> None:
        """Look where a piece is that takes long, until the end."""
        while not self.ended:
            time.sleep(_LOOK_S)
            began = self._began
            if began and time.perf_counter() - began > 2 * _LOOK_S and not self._seen:
                lines = traceback.extract_stack(sys._current_frames().get(self._thread))[-5:]
                if began == self._began:
                    self._seen = "".join(f" < {line.filename}:{line.lineno}" for line in reversed(lines))

    def collected(self, phase: str, _: Any) -> None:
        """Python looks for garbage, or has."""
        if threading.get_ident() == self._thread:
            self._garbage += time.thread_time() * (-1 if phase == "start" else 1)


@contextmanager
def pieces_of(thread: int) -> Iterator[Pieces]:
    """Measure the pieces of the event loop that runs in a thread; it is asyncio's own, not uvloop's."""
    pieces, run = Pieces(thread), asyncio.Handle._run  # type: ignore[attr-defined]

    def measured(handle: Any) -> None:
        if threading.get_ident() == thread:
            pieces.run(handle, run)
        else:
            run(handle)

    watcher = threading.Thread(target=pieces.watch, daemon=True)
    watcher.start()
    gc.callbacks.append(pieces.collected)
    asyncio.Handle._run = measured  # type: ignore[attr-defined]
    try:
        yield pieces
    finally:
        asyncio.Handle._run = run  # type: ignore[attr-defined]
        gc.callbacks.remove(pieces.collected)
        pieces.ended = True
        watcher.join()
