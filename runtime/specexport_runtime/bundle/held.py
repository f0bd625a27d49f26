"""Reading a folder as one thing while others may put another in its place.

Who reads holds the folder itself (``flock``, shared), and who replaces it holds it alone: a replacement waits for the
loads that go on, and they for its two renames. This is a courtesy. Where no lock can be had (Windows, some file
systems, other machines on a network's folder, somebody who holds it for too long) both go on without one, and a load
notices afterwards that the folder is another. Imports the standard library only.
"""

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_S = 30.0
"""Longest wait for those who hold a folder, in seconds."""


def try_lock(descriptor: int, *, alone: bool) -> bool | None:
    """Lock an open file or folder, without waiting: False if others hold it, None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextlib.contextmanager
def held(folder: Path, *, alone: bool = False) -> Iterator[Callable[[], bool]]:
    """Hold a folder, also one that is missing; gives a function that tells whether another stands there by now."""
    end = time.monotonic() + PATIENCE_S
    while True:
        descriptor, missing, place = None, False, folder
        try:
            place = Path(os.path.realpath(folder))
            descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except FileNotFoundError:
            missing = True
        except (OSError, ValueError):  # Windows opens no folder; or its name is none
            pass
        # Of an open folder nobody else gets the number, so a later one can be told from it.
        before = _identity(folder if descriptor is None else descriptor)
        if descriptor is not None:
            busy = try_lock(descriptor, alone=alone) is False or _identity(folder) != before
        else:  # between two renames, or just after them
            busy = missing and (any(place.parent.glob(f".{glob.escape(place.name)}.old-*")) or folder.exists())
        if not busy or time.monotonic() > end:
            break
        if descriptor is not None:
            os.close(descriptor)
        time.sleep(0.005)
    try:
        yield lambda: _identity(folder) != before
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _identity(folder: Path | int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(folder)
        return status.st_dev, status.st_ino
    return None
