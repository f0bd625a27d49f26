"""Work in a process of its own: what it loads is gone afterwards, and it ends when this process does."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from specexport_runtime.cli.errors import describe_error, handle_interrupts
from specexport_runtime.errors import SpecexportError


def call_in_child(work: Callable[..., None], *args: Any) -> None:
    """Call a function of a module and wait for it.

    Raises what it raises, if a user can act on it. Whatever ends this process ends the other too, which clears away
    what it began. A defect prints its traceback there; SystemExit.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(sender, work, args))
    child.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        child.join()
        if (code := child.exitcode or 0) >= 0:
            raise SystemExit(1) from None
        raise SpecexportError(
            f"the build was ended from outside (signal {-code}).",
            "see whether memory was short (`specexport doctor`), then run it again.",
        ) from None
    except BaseException:
        child.terminate()  # Ctrl-C went to both, other signals to this one
        raise
    finally:
        child.join()
    if error is not None:
        raise error


def _work(sender: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    error = None
    with handle_interrupts():
        try:
            work(*args)
        except (Exception, KeyboardInterrupt) as raised:
            if describe_error(raised) is None:
                raise
            error = raised
        with contextlib.suppress(OSError):  # nobody waits any more
            sender.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
