"""Folders and files that appear complete or not at all.

They are written under a temporary name beside their place, ``.NAME.tmp-PID``, and renamed at the end. What a killed
process leaves behind is removed by the next build. Imports the standard library and the error tree only.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specexport_runtime.errors import OutputExistsError, UserInputError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLONE_FILE = 0x40049409  # Linux ioctl FICLONE: share the blocks until one side is written


def temporary_name(path: Path) -> Path:
    """Where this process writes what will become ``path``."""
    return path.parent / f".{path.name}.tmp-{os.getpid()}"


def place_behind_links(path: Path) -> Path:
    """Where a folder will be, behind links; OutputExistsError for a link that leads back to itself."""
    place = Path(os.path.realpath(path))
    for each in (place, *place.parents):
        if each.is_symlink():
            raise OutputExistsError(f"{each} is a link that leads to itself.", "choose another folder with -o.")
    return place


def _old_name(path: Path) -> Path:
    """Where this process puts the ``path`` that it replaces, until the new one is in place."""
    return path.parent / f".{path.name}.old-{os.getpid()}"


def remove_leftovers(path: Path) -> list[Path]:
    """Remove the temporary folders of ``path`` whose process is gone; a missing ``path`` gets its old folder back."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(tmp|old)-(\d+)")
    removed = []
    for folder in sorted(path.parent.glob(f".{glob_escape(path.name)}.*-*")):
        match = pattern.fullmatch(folder.name)
        if match is None or _is_alive(int(match[2])):
            continue
        if match[1] == "old" and not path.exists():
            os.rename(folder, path)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def glob_escape(name: str) -> str:
    """``name`` with the wildcard characters of glob patterns made literal."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _is_alive(pid: int) -> bool:
    # Our own number on a leftover is that of an earlier process (numbers are reused, quickly so in containers).
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False, sync: bool = True) -> Iterator[Path]:
    """An empty temporary folder that becomes ``path`` when the block ends, and vanishes when it raises.

    If ``path`` is a link, the link stays and leads to the folder. With ``replace`` an existing ``path`` is renamed
    away, and deleted once the new folder is in place. With ``sync`` the files are flushed to the disk before that.

    UserInputError: the folder cannot be made, or the disk is full (names the written and the free bytes).
    OutputExistsError: ``path`` is in use by the time the block ends.
    """
    path = place_behind_links(path) if path.is_symlink() else path
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
    except OSError as error:
        raise _refused(error, path) from error
    try:
        try:
            temporary.mkdir()
        except OSError as error:
            raise _refused(error, path) from error
        yield temporary
        if sync:
            sync_tree(temporary)
        _put_in_place(temporary, path, replace=replace)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise _disk_full(path, tree_size(temporary)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.exists():  # else the old one is all there is
            shutil.rmtree(_old_name(path), ignore_errors=True)


def _put_in_place(temporary: Path, path: Path, *, replace: bool) -> None:
    if replace and path.exists():
        old = _old_name(path)
        try:
            os.rename(path, old)
            os.rename(temporary, path)
        finally:
            if not path.exists():  # an error, or Ctrl-C
                os.rename(old, path)
    else:
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise OutputExistsError(
                f"{path} has appeared while it was being built.", "see what is in it, then build again."
            ) from error
    _sync_folder(path.parent)


def _refused(error: OSError, path: Path) -> UserInputError:
    if error.errno in _DISK_FULL:
        return _disk_full(path, 0)
    return UserInputError(f"{path} cannot be written ({error.strerror}).", "choose another folder with -o.")


def _disk_full(path: Path, wrote: int) -> UserInputError:
    free = format_bytes(free_space(path))
    return UserInputError(
        f"the disk of {path} is full: it needs more than the {format_bytes(wrote)} written so far, {free} are free.",
        "free some space, or choose another disk with -o.",
    )


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


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file by ``write``, which gets a temporary path that ends like ``path``; UserInputError if that fails."""
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
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

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8", errors=errors)

    write_file(path, write)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one step; UserInputError if it cannot be written, ValueError at NaN and infinity."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
