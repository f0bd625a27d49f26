"""The block formats of GGUF files, as integers that ONNX Runtime's kernels multiply.

The layouts are those of ggml, which its ``gguf`` package decodes to floats; a test holds each to that. Codes are given
with their middle at the zero of the form: an engine rounds activations, and what it loses there grows with the codes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.passes.block_weight import Blocks, Form
from specexport_runtime.executors.base import Float32Array

Bytes = npt.NDArray[np.uint8]

_SUPER = 256  # weights of a super-block
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


class Format(NamedTuple):
    """One format.

    Attributes:
        form: what its blocks become.
        num_bytes: of a stored block.
        num_values: weights of a stored block.
        decode: from stored blocks [m, num_bytes] to codes [m, num_values], scales and offsets [m, num_values / block].
    """

    form: Form
    num_bytes: int
    num_values: int
    decode: Callable[[Bytes], Blocks]

    def read(self, rows: Bytes) -> Blocks:
        """Decode rows [n, bytes of a row]."""
        codes, scales, offsets = self.decode(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        num_rows = len(rows)
        return Blocks(
            codes.reshape(num_rows, -1),
            scales.reshape(num_rows, -1),
            None if offsets is None else offsets.reshape(num_rows, -1),
        )


def _blocks(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> Blocks:
    return Blocks(codes.astype(np.uint8, copy=False), scales, offsets)


def _half(stored: Bytes) -> Float32Array:
    """float32 [m, 1] of two bytes [m, 2]."""
    return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)


def _nibbles(stored: Bytes, width: int) -> Bytes:
    """[m, 2 n] of bytes [m, n]: of each ``width`` bytes first the low halves, then the high ones."""
    groups = stored.reshape(len(stored), -1, 1, width)
    halves: Bytes = (groups >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(15)
    return halves.reshape(len(stored), -1)


def _fifth_bits(stored: Bytes) -> Bytes:
    """[m, 32] of 4 bytes [m, 4], bit i for weight i."""
    return np.unpackbits(stored, axis=1, bitorder="little")


def _q4_0(stored: Bytes) -> Blocks:
    return _blocks(_nibbles(stored[:, 2:], 16), _half(stored[:, :2]))


def _q4_1(stored: Bytes) -> Blocks:
    scale, least = _half(stored[:, :2]), _half(stored[:, 2:4])
    return _blocks(_nibbles(stored[:, 4:], 16), scale, least + 8 * scale)


def _q5_0(stored: Bytes) -> Blocks:
    codes = _nibbles(stored[:, 6:], 16) | (_fifth_bits(stored[:, 2:6]) << 4)
    return _blocks(codes + np.uint8(112), _half(stored[:, :2]))


def _q5_1(stored: Bytes) -> Blocks:
    scale, least = _half(stored[:, :2]), _half(stored[:, 2:4])
    codes = _nibbles(stored[:, 8:], 16) | (_fifth_bits(stored[:, 4:8]) << 4)
    return _blocks(codes + np.uint8(112), scale, least + 16 * scale)


def _q8_0(stored: Bytes) -> Blocks:
    return _blocks(stored[:, 2:] + np.uint8(128), _half(stored[:, :2]), None)  # int8 + 128, modulo 256


def _six_bits(stored: Bytes) -> tuple[Float32Array, Float32Array]:
    """Eight scales and eight minima of six bits each from 12 bytes [m, 12]."""
    low, middle, high = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(stored: Bytes) -> Blocks:
    scales, minima = _six_bits(stored[:, 4:16])
    scales = _half(stored[:, :2]) * scales
    return _blocks(_nibbles(stored[:, 16:], 32), scales, 8 * scales - _half(stored[:, 2:4]) * minima)


def _q5_k(stored: Bytes) -> Blocks:
    scales, minima = _six_bits(stored[:, 4:16])
    scales = _half(stored[:, :2]) * scales
    fifth = (stored[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [m, 8, 32]
    codes = _nibbles(stored[:, 48:], 32) | (fifth.reshape(len(stored), -1) << 4)
    return _blocks(codes + np.uint8(112), scales, 16 * scales - _half(stored[:, 2:4]) * minima)


def _q6_k(stored: Bytes) -> Blocks:
    low = _nibbles(stored[:, :128], 64).reshape(len(stored), 8, 32)
    high = stored[:, 128:192].reshape(len(stored), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = low | ((high.reshape(len(stored), 8, 32) & 3) << 4)
    scales = _half(stored[:, 208:]) * np.ascontiguousarray(stored[:, 192:208]).view(np.int8).astype(np.float32)
    return _blocks((codes + np.uint8(96)).reshape(len(stored), -1), scales)


def _q3_k(stored: Bytes) -> Blocks:
    mask, low, packed = stored[:, :32], stored[:, 32:96], stored[:, 96:108]
    shifts = np.array([0, 2, 4, 6], np.uint8)
    codes = (low.reshape(len(stored), 2, 1, 32) >> shifts[:, None]) & 3
    third = (mask[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = codes.reshape(len(stored), -1) + np.uint8(4) + 4 * third.reshape(len(stored), -1)
    six = _nibbles(packed[:, :8], 8) | (((packed[:, None, 8:] >> shifts[:, None]) & 3).reshape(len(stored), 16) << 4)
    return _blocks(codes, _half(stored[:, 108:]) * (six.astype(np.float32) - 32))


def _q2_k(stored: Bytes) -> Blocks:
    scales = _half(stored[:, 80:82]) * (stored[:, :16] & 15).astype(np.float32)
    minima = _half(stored[:, 82:]) * (stored[:, :16] >> 4).astype(np.float32)
    codes = (stored[:, 16:80].reshape(len(stored), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    return _blocks(codes.reshape(len(stored), -1) + np.uint8(6), scales, 2 * scales - minima)


def _iq4_codes(stored: Bytes) -> Bytes:
    values: Bytes = (_IQ4_VALUES + 128).astype(np.uint8)
    return values[_nibbles(stored, 16)]


def _iq4_nl(stored: Bytes) -> Blocks:
    return _blocks(_iq4_codes(stored[:, 2:]), _half(stored[:, :2]))


def _iq4_xs(stored: Bytes) -> Blocks:
    high = np.ascontiguousarray(stored[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (stored[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(len(stored), 8) & 15
    scales = (low | ((high & 3).astype(np.uint8) << 4)).astype(np.float32) - 32
    return _blocks(_iq4_codes(stored[:, 8:]), _half(stored[:, :2]) * scales)


FORMATS = {
    "Q4_0": Format(Form(4, 32, has_offsets=False), 18, 32, _q4_0),
    "Q4_1": Format(Form(4, 32, has_offsets=True), 20, 32, _q4_1),
    "Q5_0": Format(Form(8, 32, has_offsets=False), 22, 32, _q5_0),
    "Q5_1": Format(Form(8, 32, has_offsets=True), 24, 32, _q5_1),
    "Q8_0": Format(Form(8, 32, has_offsets=False), 34, 32, _q8_0),
    "Q2_K": Format(Form(4, 16, has_offsets=True), 84, _SUPER, _q2_k),
    "Q3_K": Format(Form(4, 16, has_offsets=False), 110, _SUPER, _q3_k),
    "Q4_K": Format(Form(4, 32, has_offsets=True), 144, _SUPER, _q4_k),
    "Q5_K": Format(Form(8, 32, has_offsets=True), 176, _SUPER, _q5_k),
    "Q6_K": Format(Form(8, 16, has_offsets=False), 210, _SUPER, _q6_k),
    "IQ4_NL": Format(Form(8, 32, has_offsets=False), 18, 32, _iq4_nl),
    "IQ4_XS": Format(Form(8, 32, has_offsets=False), 136, _SUPER, _iq4_xs),
}
"""By ggml's name. All are exact up to the rounding of float32: no value is rounded to another integer."""
