"""Folders of the user's cache: what this machine measured or prepared for a bundle, and can make again.

::

    <root>/<kind>/…      root: SPECEXPORT_CACHE_DIR, else the platform's cache folder

The cache never fails a load: where it cannot be written everything works, slower, and one warning a process says so.
Its content is trusted only where no other user could have written it: folders and files of this user, not open to
others' writing. It may be deleted at any time. The compiler's engine cache lies under the same root. Imports the
standard library only.
"""

import contextlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

ROOT_VARIABLE = "SPECEXPORT_CACHE_DIR"
_log = logging.getLogger(__name__)
_warned: set[str] = set()


def warn_once(topic: str, message: str, *args: object) -> None:
    """Log a warning, the first time in this process that ``topic`` comes up."""
    if topic not in _warned:
        _warned.add(topic)
        _log.warning(message, *args)


def cache_root() -> Path:
    """``SPECEXPORT_CACHE_DIR``, else ``specexport`` in the platform's cache folder; ``RuntimeError`` without one."""
    if folder := os.environ.get(ROOT_VARIABLE):
        return _in_home(Path(folder)).expanduser()
    stated = _in_home(Path(os.environ.get("XDG_CACHE_HOME", "")))
    if stated.is_absolute():  # the specification has others ignored
        return stated / "specexport"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "specexport" / "Cache"
    return _home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "specexport"


def _in_home(path: Path) -> Path:
    return _home().joinpath(*path.parts[1:]) if path.parts[:1] == ("~",) else path


def _home() -> Path:
    home = Path.home()
    if os.environ.get("HOME") == "" and sys.platform != "win32":
        raise RuntimeError("HOME is empty")  # which Python takes for the root folder
    if not home.is_absolute():
        raise RuntimeError(f"the home folder is {str(home)!r}, which depends on the working directory")
    return home


def cache_folder(kind: str, *, writable: bool = True) -> Path | None:
    """The cache folder for a kind of data, made if need be; None, warned of once, where it does not serve."""
    try:
        if writable:
            return require_folder(kind)
        folder = cache_root() / kind
        return folder if folder.is_dir() and is_private(folder.stat()) else None
    except (OSError, RuntimeError) as error:
        if writable:
            warn_unwritable(error)
        return None


def require_folder(kind: str) -> Path:
    """The cache folder for a kind of data, made if need be; OSError or RuntimeError where nothing can be written."""
    return private_folder(cache_root() / kind)


def private_folder(folder: Path) -> Path:
    """A folder, made if need be, to which this user alone can write; OSError if it is not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder.stat()):
        raise PermissionError(0, "it belongs to somebody else, or others may write to it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, "it is read-only")
    return folder


def warn_unwritable(error: Exception) -> None:
    """Say, once a process, that the cache does not serve, why, and what to do."""
    try:
        root: Path | str = cache_root()
    except RuntimeError:
        root = "folder"
    reason = getattr(error, "strerror", None) or error
    warn_once(
        "user cache",
        "The user cache %s cannot be used (%s): this works, but loading takes longer. "
        "Fix: set %s to a folder of your own with free space.",
        root,
        reason,
        ROOT_VARIABLE,
    )


def is_private(status: os.stat_result) -> bool:
    """Whether only this user (or root) can have written what ``status`` describes."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the profile folder's access list does this
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write_json(path: Path, data: Any) -> bool:
    """Write JSON to a file of :func:`cache_folder`, in one step and for this user; False, with a warning, if not."""
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    try:
        replace_file(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        warn_unwritable(error)
        return False
    return True


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file in one step, readable by this user only; the old one stays if ``write`` raises, or OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: Path) -> Any | None:
    """What :func:`write_json` wrote; None where it is missing, damaged, or open to the writing of others."""
    try:
        with path.open(encoding="utf-8") as file:
            return json.load(file) if is_private(os.fstat(file.fileno())) else None
    except (OSError, ValueError, RecursionError):
        return None
