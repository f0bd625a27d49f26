"""The work folder of a training, of one run at a time, and the time that a run may take."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from specexport_runtime.errors import InvalidRequestError

LOCK_NAME = "run.lock"
"""Marks a work folder, and names the process that trains in it."""
_HINT = "give another folder with --work."


class Paused(Exception):  # noqa: N818 - nothing is wrong
    """The time is up before the end, and everything so far is saved."""

    def __init__(self, what: str, done: int, total: int) -> None:
        super().__init__(f"{done:,} of {total:,} {what}")
        self.what, self.done, self.total = what, done, total


class Budget:
    """The time that a run may take, from its beginning; None for as long as it needs."""

    def __init__(self, hours: float | None) -> None:
        self._end = None if hours is None else time.monotonic() + 3600 * hours

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self, what: str, done: int, total: int) -> None:
        """Raise :class:`Paused` if the time is up and something is left to do; what is done must be saved."""
        if done < total and self.is_over:
            raise Paused(what, done, total)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a work folder and keep others out (InvalidRequestError); half-written files and empty folders go."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()) and not (folder / LOCK_NAME).is_file():
                raise InvalidRequestError(f"{folder} exists and is no work folder of a training.", _HINT)
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InvalidRequestError(f"{folder} cannot be a work folder ({error.strerror}).", _HINT) from error
        try:
            _lock(descriptor, folder)
        except InvalidRequestError:
            os.close(descriptor)
            raise
        try:
            for path in folder.rglob(".*.tmp-*"):  # of files; folders have theirs removed by who makes them again
                if path.is_file():
                    path.unlink(missing_ok=True)
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
                (folder / LOCK_NAME).unlink()
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):  # one that is not empty stays
            for each in made:
                each.rmdir()


def _lock(descriptor: int, folder: Path) -> None:
    """Ends with the process, however that ends; nothing where the system has no such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        number = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        raise InvalidRequestError(
            f"process {number} is training in {folder}.", f"wait for its end, or {_HINT}"
        ) from error
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be locked ({error.strerror}).", _HINT) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
