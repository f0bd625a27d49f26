"""The end of a command whose output is read no more, as in ``specexport generate … | head``."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

EXIT_CLOSED_OUTPUT = 141
"""128 and the number of SIGPIPE, by which most programs end then."""


class ClosedOutputError(Exception):
    """The output is read no more. Not an ``OSError``: click has its own exit code for that."""


@contextlib.contextmanager
def watch_output() -> Iterator[None]:
    """Tell a closed output from other broken pipes.

    ``ClosedOutputError``: what the block wrote is read no more. ``RuntimeError``: another pipe broke, which is a
    defect.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # at the interpreter's end it would be a traceback
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # so rich ends
            raise ClosedOutputError from error
        raise
    except BrokenPipeError as error:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise RuntimeError(f"a pipe that is not the output broke: {error}") from error
        for stream in closed:
            _forget_output(stream)
        raise ClosedOutputError from error


def _is_closed(stream: Any) -> bool:
    try:
        stream.flush()  # what could not be written is still there, if there is a buffer
        place = stream.fileno()
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no stream, or none of the system's
        return False
    if not hasattr(select, "poll"):
        return False
    asked = select.poll()
    asked.register(place, select.POLLOUT)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0))


def _forget_output(stream: Any) -> None:
    """Let the interpreter flush what is left into nothing when it ends."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
