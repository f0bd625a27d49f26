"""Reading a folder as one thing while others may put another in its place.

Who reads holds the folder itself (``flock``, shared), and who replaces it holds it alone: a replacement waits for the
loads that go on, and they for its two renames. This is a courtesy. Where no lock can be had (Windows, some file
systems, other machines on a network's folder, somebody who holds it for too long) both go on without one, and a load
notices afterwards that the folder is another. Imports the standard library only.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_S = 30.0
"""Longest wait for those who hold a folder, in seconds."""


def take_lock(descriptor: int, *, alone: bool) -> bool | None:
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
        before, descriptor = _identity(folder), _open(folder)
        if descriptor is None:
            busy = before is None and _is_between_renames(folder)
        else:
            busy = take_lock(descriptor, alone=alone) is False or _identity(folder) != _identity(descriptor)
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


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:  # missing, or Windows
        return None


def _identity(folder: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_between_renames(folder: Path) -> bool:
    """Whether a replacement has renamed the old folder away, and not yet the new one into its place."""
    place = Path(os.path.realpath(folder))
    try:
        return any(name.startswith(f".{place.name}.old-") for name in os.listdir(place.parent))
    except OSError:
        return False
