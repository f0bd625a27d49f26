"""Hashes of files, and a record of files that were already checked here, so that a large file is hashed once.

The record lies in the user's cache, one JSON file for each folder. A file with the same device, inode, size,
modification and change time and the same wanted hash is not hashed again: no user can set the change time.

Limits: raw writes to the disk, a decaying disk, a clock set back, or an older shared memory map are not seen.
``SPECEXPORT_VERIFY_HASHES=1`` hashes always. A file that changed less than two seconds before is not recorded, as
clocks tick coarsely, nor anything on Windows, which has no change time. Imports the standard library only.
"""

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from specexport_runtime.errors import BundleError
from specexport_runtime.user_cache import cache_folder, read_json, write_json

VERIFY_VARIABLE = "SPECEXPORT_VERIFY_HASHES"
RECORD_KIND = "checked"
MAX_RECORDS = 1000
SETTLE_NS = 2 * 10**9
_REBUILD = "build it again with `specexport build`."
FOLLOW_LINKS = "copy the folder with `cp -rL` where its links lead to files, or bring what they lead to here as well."
_RENAME = "rename the file or folder."

Record = dict[str, list[int | str]]
"""File name → what identified it when its hash was right: see :func:`_identity`."""


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_hashing_forced() -> bool:
    """Whether ``SPECEXPORT_VERIFY_HASHES`` asks that every file be hashed at every load."""
    return os.environ.get(VERIFY_VARIABLE, "") not in ("", "0")


def check_files(folder: Path, files: "Mapping[str, FileEntry]", *, remember: bool = False) -> bool:
    """Check size and hash of files by relative path; True if nothing had to be hashed, as ``remember`` knows all."""
    root = folder.resolve()
    for name, entry in files.items():
        path = folder / name
        if (fault := find_file_fault(path)) is not None:
            raise BundleError(f"{folder}: {name} {fault[0]}.", fault[1] or _REBUILD)
        if path.stat().st_size != entry.size:
            raise BundleError(f"{folder}: {name} has {path.stat().st_size} bytes, not {entry.size}.", _REBUILD)
    remember = remember and os.name != "nt"
    known = _read_record(root) if remember and not is_hashing_forced() else {}
    stale = [name for name, entry in files.items() if known.get(name) != _identity(folder / name, entry.sha256)]
    # hashlib releases the interpreter lock, so large files are hashed side by side.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        checked = pool.map(lambda name: _check(folder / name, files[name].sha256), stale)
        for name, identity in zip(stale, checked, strict=True):
            if identity is None:
                raise BundleError(f"{folder}: {name} was altered (its sha256 does not match the manifest).", _REBUILD)
            known[name] = identity
    if remember and stale:
        _write_record(root, {name: known[name] for name in files if known[name]})
    return not stale


def file_state(path: Path) -> object:
    """What changes when a file is written or replaced: bytes, modification and change time; None if it is missing."""
    return list(_identity(path, "")[2:]) if path.exists() else None


def find_file_fault(path: Path) -> tuple[str, str] | None:
    """Why ``path`` is no file to read, and the way out; None if it is. A pipe or a device is never opened."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is no regular file", ""
        path.open("rb").close()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return f"cannot be read ({error.strerror})", "let this user read it."
        if path.is_symlink():
            return f"is a link that leads to no file ({error.strerror})", FOLLOW_LINKS
        return "is missing", ""
    return None


def native_path(path: Path) -> str:
    """A path for libraries that know UTF-8 only, whatever the locale; BundleError if its bytes are not UTF-8."""
    try:
        return os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{path} has a name that is not UTF-8, so its engine cannot be opened.", _RENAME) from None


def _check(path: Path, sha256: str) -> list[int | str] | None:
    """The file's identity if its hash is right, empty if it may still be changing; None for a wrong hash."""
    before = _identity(path, sha256)
    if sha256_file(path) != sha256:
        return None
    # What changes during the hashing differs from ``before`` at the next check.
    return before if int(before[4]) + SETTLE_NS < time.time_ns() else []


def _identity(path: Path, sha256: str) -> list[int | str]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, sha256]


def _record_path(root: Path, records: Path) -> Path:
    return records / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.json"


def _read_record(root: Path) -> Record:
    records = cache_folder(RECORD_KIND, writable=False)
    data = read_json(_record_path(root, records)) if records is not None else None
    if not isinstance(data, dict) or data.get("folder") != str(root) or not isinstance(data.get("files"), dict):
        return {}
    return {str(name): list(identity) for name, identity in data["files"].items() if isinstance(identity, list)}


def _write_record(root: Path, files: Record) -> None:
    records = cache_folder(RECORD_KIND)
    if records is not None and files and write_json(_record_path(root, records), {"folder": str(root), "files": files}):
        _forget_oldest(records)


def _forget_oldest(records: Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove the same ones
        paths = list(records.iterdir())
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[: len(paths) - MAX_RECORDS]:
            path.unlink()


@dataclass(frozen=True)
class FileEntry:
    """Hash and size (bytes) of one file of a bundle."""

    sha256: str
    size: int


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Hash and size of each named file of ``folder``."""
    return {name: FileEntry(sha256_file(folder / name), (folder / name).stat().st_size) for name in sorted(names)}
