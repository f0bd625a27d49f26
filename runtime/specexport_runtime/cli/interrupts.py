"""What Ctrl-C does while a command runs: it ends it, and what it began is cleared away whole."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_INTERRUPTED = 130


class Interrupts:
    """The handler of SIGINT.

    The first one raises ``KeyboardInterrupt``. While that goes up, and what it passes is cleared away, others are not
    heard: they would break that off. Once all is clear they end the process, whatever it still waits for.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # what a handler is called with
        """Handle one."""
        self.came = True
        error = sys.exception()
        while error is not None:
            if isinstance(error, KeyboardInterrupt):
                return
            error = error.__context__
        raise KeyboardInterrupt

    def all_is_clear(self) -> None:
        """Nothing is left to clear away: the next one may end the process."""
        if self.came:
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


@contextlib.contextmanager
def handle_interrupts() -> Iterator[Interrupts]:
    """Handle SIGINT as :class:`Interrupts` says, unless somebody else does, or ignores it."""
    handler = Interrupts()
    in_charge = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if in_charge:
        signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        if in_charge and not handler.came:
            signal.signal(signal.SIGINT, signal.default_int_handler)
