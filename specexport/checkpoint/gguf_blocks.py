"""The block formats of GGUF files, as integers that ONNX Runtime's kernels multiply.

The layouts are those of ggml, which its ``gguf`` package decodes to floats; a test holds each to that. Codes are given
with their middle at the zero of the form: an engine rounds activations, and what it loses there grows with the codes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.passes.block_format import BOOKS
from specexport.passes.block_weight import BlockForm, Blocks, ScaleLayout, StoredScales
from specexport_runtime.executors.base import Float32Array

Bytes = npt.NDArray[np.uint8]

_SUPER = 256  # weights of a super-block


class GgufBlockFormat(NamedTuple):
    """A block format."""

    form: BlockForm  # what its blocks become
    num_bytes: int  # of a stored block
    num_values: int  # weights of a stored block
    # Stored blocks [m, num_bytes] to codes [m, num_values], and what scales and offsets are made of
    decode: Callable[[Bytes], tuple[np.ndarray, StoredScales]]
    spread: ScaleLayout  # how scales and offsets are made of that

    def read(self, rows: Bytes) -> Blocks:
        """Decode rows [n, bytes of a row]."""
        codes, stored = self.decode(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        num_rows = len(rows)
        scales, offsets = _compute_scales(stored, self.spread.shift)
        parts: list[Any] = [None if part is None else part.reshape(num_rows, -1) for part in stored]
        return Blocks(
            codes.astype(np.uint8, copy=False).reshape(num_rows, -1),
            scales.reshape(num_rows, -1),
            None if offsets is None else offsets.reshape(num_rows, -1),
            StoredScales(*parts),
        )

    def floats(self, rows: Bytes, out: Float32Array) -> None:
        """Decode rows [n, bytes of a row] into ``out`` [n, K]: what ``gguf.dequantize`` makes of them, bit for bit."""
        codes, stored = self.decode(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        plain = (codes - np.uint8(self.form.zero - self.spread.shift)).view(np.int8)  # as the file counts them
        scales, least = _compute_stored_scales(stored)
        values = out.reshape(*scales.shape, -1)
        np.copyto(values, plain.reshape(values.shape))
        values *= scales[..., None]
        if least is not None:
            values += least[..., None]


def _compute_scales(stored: StoredScales, shift: int) -> tuple[Float32Array, Float32Array | None]:
    """float32 scales and offsets [m, n] of what is stored; see ``ScaleLayout``."""
    scales, least = _compute_stored_scales(stored)
    return scales, None if least is None else np.float32(shift) * scales + least


def _compute_stored_scales(stored: StoredScales) -> tuple[Float32Array, Float32Array | None]:
    """float32 [m, n]: what the file's codes are multiplied by, and what is added, or None."""
    scales, least = stored.base.astype(np.float32), None
    if stored.levels is not None:
        scales = scales * stored.levels.astype(np.float32)
    if stored.least is not None:
        least = stored.least.astype(np.float32)
        if stored.minima is not None:
            least = least * stored.minima.astype(np.float32)
    return scales, least


def _view_float16(stored: Bytes) -> npt.NDArray[np.float16]:
    """float16 [m, 1] of two bytes [m, 2]."""
    return np.ascontiguousarray(stored).view(np.float16)


def _nibbles(stored: Bytes, width: int) -> Bytes:
    """[m, 2 n] of bytes [m, n]: of each ``width`` bytes first the low halves, then the high ones."""
    groups = stored.reshape(len(stored), -1, width)
    halves = np.empty((len(stored), groups.shape[1], 2, width), np.uint8)
    np.bitwise_and(groups, 15, out=halves[:, :, 0])
    np.right_shift(groups, 4, out=halves[:, :, 1])
    return halves.reshape(len(stored), -1)


def _fifth_bits(stored: Bytes) -> Bytes:
    """[m, 32] of 4 bytes [m, 4], bit i for weight i."""
    return np.unpackbits(stored, axis=1, bitorder="little")


def _q4_0(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return _nibbles(stored[:, 2:], 16), StoredScales(_view_float16(stored[:, :2]))


def _q4_1(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return _nibbles(stored[:, 4:], 16), StoredScales(_view_float16(stored[:, :2]), least=_view_float16(stored[:, 2:4]))


def _q5_0(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    codes = _nibbles(stored[:, 6:], 16) | (_fifth_bits(stored[:, 2:6]) << 4)
    return codes + np.uint8(112), StoredScales(_view_float16(stored[:, :2]))


def _q5_1(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    codes = _nibbles(stored[:, 8:], 16) | (_fifth_bits(stored[:, 4:8]) << 4)
    return codes + np.uint8(112), StoredScales(_view_float16(stored[:, :2]), least=_view_float16(stored[:, 2:4]))


def _q8_0(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return stored[:, 2:] + np.uint8(128), StoredScales(_view_float16(stored[:, :2]))  # int8 + 128, modulo 256


def _six_bits(stored: Bytes) -> StoredScales:
    """Eight scales and eight minima of six bits each, from two halves and 12 bytes [m, 16]."""
    low, high = np.ascontiguousarray(stored[:, 4:12]).view("<u4"), np.ascontiguousarray(stored[:, 12:16]).view("<u4")
    halves = np.stack([high, high >> 4], axis=1) & 0x0F0F0F0F  # four bytes at a time
    six = np.concatenate([(low & 0x3F3F3F3F)[..., None], halves | ((low[..., None] >> 2) & 0x30303030)], axis=2)
    levels, minima = np.ascontiguousarray(six.transpose(1, 0, 2)).view(np.int8)
    return StoredScales(_view_float16(stored[:, :2]), levels, -_view_float16(stored[:, 2:4]), minima)


def _q4_k(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return _nibbles(stored[:, 16:], 32), _six_bits(stored[:, :16])


def _q5_k(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    fifth = (stored[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [m, 8, 32]
    codes = _nibbles(stored[:, 48:], 32) | (fifth.reshape(len(stored), -1) << 4)
    return codes + np.uint8(112), _six_bits(stored[:, :16])


def _q6_k(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    low, high = _nibbles(stored[:, :128], 64), np.ascontiguousarray(stored[:, 128:192]).reshape(-1, 2, 32)
    codes = np.empty((len(stored), 2, 4, 32), np.uint8)
    for at, bits in enumerate((high << 4, high << 2, high, high >> 2)):
        np.bitwise_and(bits, 48, out=codes[:, :, at])
    codes |= low.reshape(codes.shape)
    codes += np.uint8(96)
    levels = np.ascontiguousarray(stored[:, 192:208]).view(np.int8)
    return codes.reshape(len(stored), -1), StoredScales(_view_float16(stored[:, 208:]), levels)


def _q3_k(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    mask, low, packed = stored[:, :32], stored[:, 32:96], stored[:, 96:108]
    shifts = np.array([0, 2, 4, 6], np.uint8)
    codes = (low.reshape(len(stored), 2, 1, 32) >> shifts[:, None]) & 3
    third = (mask[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = codes.reshape(len(stored), -1) + np.uint8(4) + 4 * third.reshape(len(stored), -1)
    six = _nibbles(packed[:, :8], 8) | (((packed[:, None, 8:] >> shifts[:, None]) & 3).reshape(len(stored), 16) << 4)
    return codes, StoredScales(_view_float16(stored[:, 108:]), six.astype(np.int8) - np.int8(32))


def _q2_k(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    levels, minima = (stored[:, :16] & 15).astype(np.int8), (stored[:, :16] >> 4).astype(np.int8)
    codes = (stored[:, 16:80].reshape(len(stored), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    return (
        codes.reshape(len(stored), -1) + np.uint8(6),
        StoredScales(_view_float16(stored[:, 80:82]), levels, -_view_float16(stored[:, 82:]), minima),
    )


def _from_book(name: str, stored: Bytes) -> Bytes:
    values: Bytes = (BOOKS[name] + 128).astype(np.uint8)
    return values[_nibbles(stored, 16)]


def _iq4_nl(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return _from_book("iq4", stored[:, 2:]), StoredScales(_view_float16(stored[:, :2]))


def _iq4_xs(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    high = np.ascontiguousarray(stored[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (stored[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(len(stored), 8) & 15
    levels = (low | ((high & 3).astype(np.uint8) << 4)).astype(np.int8) - np.int8(32)
    return _from_book("iq4", stored[:, 8:]), StoredScales(_view_float16(stored[:, :2]), levels)


def _mxfp4(stored: Bytes) -> tuple[np.ndarray, StoredScales]:
    return _from_book("fp4", stored[:, 1:]), StoredScales(np.ldexp(np.float32(1), stored[:, :1].astype(np.int32) - 128))


def _make_two_level_layout(shift: int) -> ScaleLayout:
    return ScaleLayout(_SUPER, levels=True, minima=True, shift=shift)


FORMATS = {
    "Q4_0": GgufBlockFormat(BlockForm(4, 32, has_offsets=False), 18, 32, _q4_0, ScaleLayout(32)),
    "Q4_1": GgufBlockFormat(BlockForm(4, 32, has_offsets=True), 20, 32, _q4_1, ScaleLayout(32, shift=8)),
    "Q5_0": GgufBlockFormat(BlockForm(8, 32, has_offsets=False), 22, 32, _q5_0, ScaleLayout(32)),
    "Q5_1": GgufBlockFormat(BlockForm(8, 32, has_offsets=True), 24, 32, _q5_1, ScaleLayout(32, shift=16)),
    "Q8_0": GgufBlockFormat(BlockForm(8, 32, has_offsets=False), 34, 32, _q8_0, ScaleLayout(32)),
    "Q2_K": GgufBlockFormat(BlockForm(4, 16, has_offsets=True), 84, _SUPER, _q2_k, _make_two_level_layout(2)),
    "Q3_K": GgufBlockFormat(BlockForm(4, 16, has_offsets=False), 110, _SUPER, _q3_k, ScaleLayout(_SUPER, levels=True)),
    "Q4_K": GgufBlockFormat(BlockForm(4, 32, has_offsets=True), 144, _SUPER, _q4_k, _make_two_level_layout(8)),
    "Q5_K": GgufBlockFormat(BlockForm(8, 32, has_offsets=True), 176, _SUPER, _q5_k, _make_two_level_layout(16)),
    "Q6_K": GgufBlockFormat(BlockForm(8, 16, has_offsets=False), 210, _SUPER, _q6_k, ScaleLayout(_SUPER, levels=True)),
    "IQ4_NL": GgufBlockFormat(BlockForm(8, 32, has_offsets=False), 18, 32, _iq4_nl, ScaleLayout(32)),
    "MXFP4": GgufBlockFormat(BlockForm(8, 32, has_offsets=False), 17, 32, _mxfp4, ScaleLayout(32, powers=True)),
    "IQ4_XS": GgufBlockFormat(
        BlockForm(8, 32, has_offsets=False), 136, _SUPER, _iq4_xs, ScaleLayout(_SUPER, levels=True)
    ),
}
"""By ggml's name. All are exact up to the rounding of float32: no value is rounded to another integer."""
