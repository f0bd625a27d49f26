"""Storing an engine as its difference from another of the same model: the weights are in both.

TensorRT's own way (``STRIP_PLAN``) fails in a builder without a GPU (docs/gpu.md). So files are cut where their content
says so, and equal pieces are found by their hash: nothing is known of the engine's format.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specexport.atomic import temporary_name
from specexport_runtime.bundle.delta import MAGIC, NUMBER, Copies, apply_delta
from specexport_runtime.errors import CheckFailedError

WORTH = 0.9
"""A delta is kept below this share of the whole file."""
_PIECE_BITS = 12  # a piece is 4 KB long on average
_SMALLEST = 512
_BLOCK = 1 << 23
_WORD = 8
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: its products' top bits depend on all bits

Bytes = npt.NDArray[np.uint8]


def store_as_delta(whole: Path, base: Path, delta: Path) -> bool:
    """Replace the file ``whole`` by its difference from ``base``, where that is worth it; returns whether it was."""
    base_bytes, bytes_ = _map(base), _map(whole)
    copies = find_copies(base_bytes, bytes_)
    literal_bytes = bytes_.size - int(copies[:, 2].sum())
    if literal_bytes + copies.nbytes > WORTH * bytes_.size:
        return False
    written = temporary_name(delta)
    with written.open("wb") as file:
        file.write(MAGIC)
        np.array([base_bytes.size, bytes_.size, len(copies)], NUMBER).tofile(file)
        copies.astype(NUMBER).tofile(file)
        done = 0
        for at, _, count in copies.tolist():
            bytes_[done:at].tofile(file)
            done = at + count
        bytes_[done:].tofile(file)
    if not np.array_equal(np.frombuffer(apply_delta(written, base), np.uint8), bytes_):
        raise CheckFailedError(f"{delta} does not give {whole} again.")
    os.replace(written, delta)
    whole.unlink()
    return True


def find_copies(base: Bytes, whole: Bytes) -> Copies:
    """What ``whole`` has in common with ``base``, in the order of where it lies in ``whole``; see ``bundle.delta``."""
    known: dict[bytes, int] = {}
    for start, end in _pieces(base):
        known.setdefault(_digest(base[start:end]), start)
    found: list[list[int]] = []
    for start, end in _pieces(whole):
        offset = known.get(_digest(whole[start:end]))
        if offset is None:
            continue
        last = found[-1] if found else [0, 0, 0]
        if found and start == last[0] + last[2] and offset == last[1] + last[2]:
            last[2] += end - start
        else:
            found.append([start, offset, end - start])
    return np.array(found, np.int64).reshape(-1, 3)


def _digest(piece: Bytes) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=16).digest()


def _pieces(data: Bytes) -> Iterator[tuple[int, int]]:
    """Cut where eight bytes have a rare hash: equal contents are cut alike, however far they were moved."""
    start = 0
    for cut in _cuts(data):
        if cut - start >= _SMALLEST:
            yield start, cut
            start = cut
    if start < data.size:
        yield start, data.size


def _cuts(data: Bytes) -> Iterator[int]:
    for begin in range(0, data.size, _BLOCK):
        block = data[begin : begin + _BLOCK + _WORD - 1]
        found = []
        for shift in range(min(_WORD, max(block.size - _WORD + 1, 0))):
            words = block[shift : shift + (block.size - shift) // _WORD * _WORD].view(np.uint64)
            # Zeros would be cut everywhere: their product is zero.
            (rare,) = np.nonzero(((words * _MIXER) >> np.uint64(64 - _PIECE_BITS) == 0) & (words != 0))
            found.append(rare * _WORD + shift)
        yield from (np.sort(np.concatenate(found)) + begin + _WORD).tolist() if found else ()


def _map(path: Path) -> Bytes:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
