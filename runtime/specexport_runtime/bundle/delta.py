"""A file stored as its difference from another: what both hold is copied, the rest is in the delta.

Engines of one model for several GPU architectures differ in their kernels and hold the same weights, so a bundle has
one of them whole and the others as deltas. The format is little-endian: eight bytes of :data:`MAGIC`; the size of the
base, the size of the result and the number of copies, as int64; each copy as three int64 (where it goes, where it comes
from in the base, bytes), in the order of where they go; then all that lies between them. Written by
``specexport.backends.engine_delta``. Imports numpy only.
"""

import mmap
import os
import struct
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import BundleError

MAGIC = b"SXDELTA1"
NUMBER = np.dtype("<i8")
_HEAD = struct.Struct("<8s3q")
_MOST_BYTES = 1 << 50
_REBUILD = "build it again with `specexport build`."

Copies = npt.NDArray[np.int64]
"""[n, 3]: where a copy goes, where it comes from, bytes."""


def delta_size(path: Path) -> int:
    """Bytes of the file that a delta stands for; BundleError if ``path`` is no delta."""
    with path.open("rb") as file:
        return _read_sizes(file, path)[1]


def apply_delta(path: Path, base: Path) -> bytearray:
    """The file that the delta at ``path``, made from ``base``, stands for; BundleError if the two do not fit."""
    if not base.is_file():
        raise BundleError(f"{path}: {base} is missing.", _REBUILD)
    with path.open("rb") as file, base.open("rb") as whole:
        base_size, size, count = _read_sizes(file, path)
        if whole.seek(0, os.SEEK_END) != base_size:
            raise BundleError(f"{path}: made from {base_size} bytes, and {base} has {whole.tell()}.", _REBUILD)
        copies = _read_copies(file, path, count)
        own_bytes = path.stat().st_size - file.tell()
        if not _are_valid(copies, base_size, size, own_bytes):
            raise BundleError(f"{path} is cut, or its list of copies is damaged.", _REBUILD)
        result = bytearray(size)
        into = memoryview(result)
        # An empty file cannot be mapped; a delta from one has no copies.
        source = memoryview(mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) if base_size else b"")
        done = 0
        for at, offset, length in copies.tolist():
            file.readinto(into[done:at])
            into[at : at + length] = source[offset : offset + length]
            done = at + length
        file.readinto(into[done:])
        return result


def _read_sizes(file: BufferedReader, path: Path) -> tuple[int, int, int]:
    start = file.read(_HEAD.size)
    magic, *sizes = _HEAD.unpack(start) if len(start) == _HEAD.size else (b"",)
    if magic != MAGIC or not all(0 <= size <= _MOST_BYTES for size in sizes):
        raise BundleError(f"{path} is not the difference of two engines.", _REBUILD)
    base_size, size, count = sizes
    return base_size, size, count


def _read_copies(file: BufferedReader, path: Path, count: int) -> Copies:
    """Fewer than ``count`` where the file ends before."""
    room = (path.stat().st_size - file.tell()) // (3 * NUMBER.itemsize)
    return np.frombuffer(file.read(min(count, room) * 3 * NUMBER.itemsize), NUMBER).reshape(-1, 3)


def _are_valid(copies: Copies, base_size: int, size: int, own_bytes: int) -> bool:
    """Whether copies lie inside the base, follow each other in the result, and leave as much as the delta holds."""
    if (copies < 0).any() or (copies > _MOST_BYTES).any():
        return False
    at, offset, length = copies.T
    ends = at + length
    inside = (offset + length <= base_size).all() and (ends <= size).all()
    return bool(inside and (at[1:] >= ends[:-1]).all() and size - int(length.sum()) == own_bytes)
