"""Folders and files that appear complete or not at all.

They are written under a temporary name beside their place, ``.NAME.tmp-MARK``, and renamed at the end. A lock on
``.NAME.lock-MARK`` tells what a killed process left behind, which the next build removes, also where the writer ran in
another container. Imports the standard library, the error tree and the runtime's locks only.
"""

import contextlib
import errno
import json
import os
import re
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.bundle.held import held, try_lock
from specexport_runtime.errors import OutputExistsError, UserInputError, describe_write_fault

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_CLONE_FILE = 0x40049409  # Linux ioctl FICLONE: share the blocks until one side is written


def place_behind_links(path: Path) -> Path:
    """Where a folder will be, behind links; OutputExistsError for a link that leads back to itself."""
    place = Path(os.path.realpath(path))
    for each in (place, *place.parents):
        if each.is_symlink():
            raise OutputExistsError(f"{each} is a link that leads to itself.", "choose another folder with -o.")
    return place


class _Names(NamedTuple):
    """What lies beside a folder while it is written: names that end in one random mark."""

    tmp: Path  # what will become the folder
    old: Path  # the folder that it replaces, until it is in place
    lock: Path  # locked as long as its writer lives


def _names(path: Path, mark: str) -> _Names:
    return _Names(*(path.with_name(f".{path.name}.{kind}-{mark}") for kind in _Names._fields))


def remove_leftovers(path: Path) -> list[Path]:
    """Remove what writers of ``path`` left who are gone; a missing ``path`` gets its old folder back."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(?:tmp|old|lock)-([0-9a-f]+)")
    matches = [pattern.fullmatch(each.name) for each in path.parent.iterdir()]
    removed = []
    for names in [_names(path, mark) for mark in sorted({match[1] for match in matches if match})]:
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # others clear away as well
            if names.lock.exists():
                lock = stack.enter_context(names.lock.open("r+b"))
                if try_lock(lock.fileno(), alone=True) is not True:
                    continue
            _put_back(names, path)
            for folder in (names.tmp, names.old):
                if folder.exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
            names.lock.unlink()
    return removed


@contextlib.contextmanager
def _reserve_names(path: Path) -> Iterator[_Names]:
    """Names that no writer has, locked within the block; nothing has them afterwards."""
    while True:
        names = _names(path, secrets.token_hex(4))
        with names.lock.open("xb") as lock:
            try:
                # Before it was locked others may have taken it for a leftover.
                if try_lock(lock.fileno(), alone=True) is not False and names.lock.exists():
                    yield names
                    return
            finally:
                shutil.rmtree(names.tmp, ignore_errors=True)
                if path.exists():  # else the old one is all there is
                    shutil.rmtree(names.old, ignore_errors=True)
                names.lock.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False, sync: bool = True) -> Iterator[Path]:
    """An empty temporary folder that becomes ``path`` when the block ends, and vanishes when it raises.

    If ``path`` is a link, the link stays and leads to the folder. With ``replace`` an existing ``path`` is renamed
    away once nobody loads it, and deleted when the new folder is in place. With ``sync`` the files are flushed to the
    disk before that.

    UserInputError: the folder cannot be made or written; of a full disk it names the written and the free bytes.
    OutputExistsError: ``path`` is in use by the time the block ends.
    """
    path = place_behind_links(path) if path.is_symlink() else path
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
            names = stack.enter_context(_reserve_names(path))
            names.tmp.mkdir()
        except OSError as error:
            raise _write_error(error, path) from error
        try:
            yield names.tmp
            if sync:
                sync_tree(names.tmp)
            _put_in_place(names, path, replace=replace)
        except OSError as error:
            if error.errno is None and str(error).endswith(" written"):  # numpy says how much of an array, and not why
                limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                error.errno = errno.EFBIG if 0 <= limit < free_space(path) else errno.ENOSPC
            if describe_write_fault(error) is None:
                raise
            raise _write_error(error, path, tree_size(names.tmp)) from error


def _put_back(names: _Names, path: Path) -> None:
    """Give a missing folder its old content again, unless others put theirs there meanwhile."""
    if names.old.exists() and not path.exists():
        try:
            os.rename(names.old, path)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise


def _put_in_place(names: _Names, path: Path, *, replace: bool) -> None:
    while True:
        # The parent as well: who finds nothing at `path`, as another replaces it just now, has nothing to hold there.
        with held(path, alone=True), held(path.parent, alone=True):
            try:
                if replace and path.exists():
                    os.rename(path, names.old)
                os.rename(names.tmp, path)
                break
            except OSError as error:
                taken = error.errno in _TAKEN
                if taken and not replace:
                    raise OutputExistsError(
                        f"{path} has appeared while it was being built.", "see what is in it, then build again."
                    ) from error
                # Another replacement may have come between where nothing can be held.
                if not (taken or error.errno == errno.ENOENT) or not names.tmp.exists():
                    raise
            finally:
                _put_back(names, path)  # after an error, or Ctrl-C
        shutil.rmtree(names.old, ignore_errors=True)
    _sync_folder(path.parent)


def _write_error(error: OSError, path: Path, wrote: int = 0) -> UserInputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(free_space(path))
        return UserInputError(
            f"the disk of {path} is full: it needs more than {format_bytes(wrote)} written so far, {free} are free.",
            "free some space, or choose another disk with -o.",
        )
    said, fix = describe_write_fault(error) or (error.strerror, "choose another folder with -o.")
    return UserInputError(f"{path} cannot be written ({said}).", fix)


def require_space(path: Path, needed: int) -> None:
    """Check that the disk of ``path`` has room for ``needed`` bytes, before long work; UserInputError names both."""
    free = free_space(path)
    if free < needed:
        raise UserInputError(
            f"the disk of {path} is too small: about {format_bytes(needed)} are needed, {format_bytes(free)} are free.",
            "free some space, or choose a folder on another disk.",
        )


def free_space(path: Path) -> int:
    """Bytes free on the disk that holds ``path`` (or will)."""
    folder = path.resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def format_bytes(count: int) -> str:
    """Bytes for a reader: ``1,073,741,824 bytes (1.07 GB)``."""
    if count < 1_000_000:
        return f"{count:,} bytes"
    return f"{count:,} bytes ({count / 1e9:.2f} GB)" if count >= 10**8 else f"{count:,} bytes ({count / 1e6:.1f} MB)"


def tree_size(folder: Path) -> int:
    """Bytes of all files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync_tree(folder: Path) -> None:
    """Flush every file and folder under ``folder`` to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clone_file(source: Path, destination: Path) -> None:
    """Copy a file, sharing its blocks where the file system can; never a hard link, which would share later writes."""
    import fcntl

    with source.open("rb") as reader, destination.open("xb") as writer, contextlib.suppress(OSError):
        fcntl.ioctl(writer.fileno(), _CLONE_FILE, reader.fileno())
        return
    shutil.copyfile(source, destination)


def check_writable(path: Path) -> None:
    """Refuse a place that no file can be written to (UserInputError), before the work starts."""
    if path.is_dir():
        raise UserInputError(f"{path} is a folder.", "name a file.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserInputError(f"{path} cannot be written: its folder is missing or closed.", "choose another place.")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file by ``write``, which gets a temporary path that ends like ``path``; UserInputError if that fails."""
    temporary = path.with_name(f".{path.stem}.tmp-{secrets.token_hex(4)}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserInputError(f"{path} cannot be written ({error.strerror}).", "choose another place.") from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            temporary.unlink()


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a UTF-8 text file in one step; UserInputError if it cannot be written."""
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors=errors))


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one step; UserInputError if it cannot be written, ValueError at NaN and infinity."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
