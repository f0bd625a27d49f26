"""What Ctrl-C does in a conversation: it ends an answer or a line, never what was said before."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class InterruptHandler:
    """The handler of SIGINT while a user talks to a model.

    While a line is read the signal raises ``KeyboardInterrupt``. At other times the first one is kept for
    :meth:`notify_on_interrupt`, and the second one is the earlier handler's: the command ends.
    """

    def __init__(self) -> None:
        self._earlier: Callable[[int, FrameType | None], object] | None = None
        self._is_reading = False
        self._came = False
        self._tell: Callable[[], object] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle one."""
        if self._is_reading:
            raise KeyboardInterrupt
        if self._came and self._earlier is not None:
            self._earlier(number, frame)
            return
        self._came = True
        if self._tell is not None:
            self._tell()

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Handle SIGINT here, unless it is ignored, or this is not the main thread."""
        earlier = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(earlier):
            yield
            return
        self._earlier = earlier
        signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)

    @contextlib.contextmanager
    def allow_interrupts(self) -> Iterator[None]:
        """A line is read; ``KeyboardInterrupt`` if Ctrl-C comes, or had come since the last line without being told."""
        came, self._came = self._came, False
        try:
            self._is_reading = True
            if came:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_reading = False

    @contextlib.contextmanager
    def notify_on_interrupt(self, tell: Callable[[], object]) -> Iterator[None]:
        """Tell of the first Ctrl-C; ``tell`` is called in a signal handler, and must not wait for anything."""
        self._tell = tell
        if self._came:
            tell()
        try:
            yield
        finally:
            self._tell, self._came = None, False
