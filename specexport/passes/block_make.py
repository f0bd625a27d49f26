"""Float weights rounded to integers in blocks."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.channel_ranges import FloatVector
from specexport.onnx_emit import part_of
from specexport.passes.base import sizes_of
from specexport.passes.block_search import extreme_blocks, search_blocks
from specexport.passes.block_weight import Blocks, BlockWeight, Form, Rows, Spread, Stored
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Float32Array

BLOCK = 32
INT8, INT4 = "int8", "group4_32_f16_zero"
"""Formats of weights that are rounded here."""
_LARGEST, _ZERO = 127, 128
_MOST = float(np.finfo(np.float16).max)


def int8_weight(tensor: ir.TensorProtocol, *, turned: bool) -> BlockWeight:
    """Codes of 8 bits and a float16 scale for every 32 inputs: ``value = scale * (code - 128)``.

    The scale is the block's largest magnitude over 127, rounded up, and codes are chosen by it as it is stored. The
    float weight is [N, K] if it is ``turned``, else [K, N]; K is filled up with zeros.
    """
    form = Form(8, BLOCK, has_offsets=False)
    return _rounded("int8", INT8, form, tensor, turned, _eight_bits, Spread(BLOCK))


def int4_weight(tensor: ir.TensorProtocol, *, turned: bool, importance: FloatVector | None) -> BlockWeight:
    """Codes of 4 bits, and a float16 scale and a zero point for every 32 inputs: ``value = scale * (code - zero)``.

    The float weight is as in :func:`int8_weight`. With the ``importance`` of each input, float32 [K], scales and zero
    points are searched for; None takes a block's extremes.
    """
    form = Form(4, BLOCK, has_offsets=True)
    return _rounded("int4", INT4, form, tensor, turned, partial(_four_bits, importance))


def _rounded(
    kind: str,
    format: str,  # noqa: A002
    form: Form,
    tensor: ir.TensorProtocol,
    turned: bool,
    make: Callable[[Float32Array], Blocks],
    spread: Spread | None = None,
) -> BlockWeight:
    axis = 0 if turned else 1
    sizes = sizes_of(tensor)
    width, depth = sizes[axis], -(-sizes[1 - axis] // BLOCK) * BLOCK

    def read(rows: Rows) -> Blocks:
        start, stop = int(rows.min()), int(rows.max()) + 1
        part = part_of(tensor, axis, start, stop)
        channels = (part if turned else part.T)[rows - start]
        values = np.zeros((len(rows), depth), np.float32)
        values[:, : channels.shape[1]] = channels
        return make(values.reshape(len(rows), -1, BLOCK))

    return BlockWeight(kind, form, (width, depth), tensor.nbytes, read, spread, format)


def _eight_bits(values: Float32Array) -> Blocks:
    base = half_up(np.abs(values).max(axis=2) / np.float32(_LARGEST))
    scales = base.astype(np.float32)
    codes = np.rint(values / np.where(scales > 0, scales, np.float32(1))[..., None]) + _ZERO
    return Blocks(codes.astype(np.uint8).reshape(len(values), -1), scales, None, Stored(base))


def _four_bits(importance: FloatVector | None, values: Float32Array) -> Blocks:
    if importance is None:
        codes, scales, zeros = extreme_blocks(values)
    else:
        weights = np.zeros(values.shape[1] * BLOCK, np.float32)
        weights[: len(importance)] = importance
        codes, scales, zeros = search_blocks(values, weights.reshape(-1, BLOCK))
    offsets = scales * (np.float32(8) - zeros.astype(np.float32))
    return Blocks(codes.reshape(len(values), -1), scales, offsets)


def half_up(scales: Float32Array) -> np.ndarray:
    """The least float16 that is no smaller; raises ``UnsupportedModelError`` where there is none."""
    if scales.size and not float(scales.max()) <= _MOST:
        raise UnsupportedModelError(
            f"weights of up to {scales.max() * _LARGEST:.3g} are larger than quantization can store.",
            "build without --quantize (for a draft: --draft-quantize).",
        )
    near = scales.astype(np.float16)
    low = near.astype(np.float32) < scales
    up: np.ndarray = np.where(low, np.nextafter(near, np.float16(np.inf)), near)
    return up
