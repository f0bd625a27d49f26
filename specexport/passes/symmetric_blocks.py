"""A float matrix rounded to 4 bits in blocks, symmetric: as GPUs take it."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.passes.quantize_sites import round_scales

_LEAST, _MOST = -8, 7
_SHRINK = (1.0, 0.93, 0.86, 0.79)
"""Shares of a block's largest weight that are tried as the largest code: the one with the least squared error stays."""


def scale_dtype(weight: ir.DataType) -> np.dtype:
    """What scales are rounded to before codes are chosen: bfloat16 beside such weights, else float16."""
    return (ir.DataType.BFLOAT16 if weight == ir.DataType.BFLOAT16 else ir.DataType.FLOAT16).numpy()


def quantize_blocks(
    matrix: np.ndarray, block: int, rounded: npt.DTypeLike = np.float16
) -> tuple[np.ndarray, np.ndarray]:
    """Codes int4 [K, N] from -8 to 7 and scales of a float32 matrix [K, N]: ``value = code * scale``.

    The largest weight of a block is given -8, the code that has no opposite; or the scale is a little smaller, where
    that costs less over the block. Scales are float32 [K / block, N], some negative, and are rounded to the dtype
    ``rounded`` before the codes are chosen; UnsupportedModelError if that is too small for one. ``block`` divides K.
    """
    depth, width = matrix.shape
    values = matrix.reshape(depth // block, block, width)
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    tried = [_quantize_with_scales(values, largest * np.float32(share / _LEAST), rounded) for share in _SHRINK]
    best = np.argmin([error for _, _, error in tried], axis=0)
    codes = np.choose(best, [found for found, _, _ in tried])
    scales = np.choose(best, [scale for _, scale, _ in tried])
    return codes.reshape(depth, width).astype(ml_dtypes.int4), scales[:, 0]


def _quantize_with_scales(
    values: np.ndarray, scales: np.ndarray, rounded: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of blocks [n, block, N] with given scales [n, 1, N], the scales as they are stored, and squared errors."""
    least = np.float32(2.0**-24 if np.dtype(rounded) == np.float16 else 2.0**-126)
    stored = round_scales(scales, rounded, -_LEAST)
    scales = np.where(stored != 0, stored, np.where(scales == 0, np.float32(1), np.copysign(least, scales)))
    codes = np.clip(np.rint(values / scales), _LEAST, _MOST)
    return codes, scales, np.square(codes * scales - values).sum(axis=1, keepdims=True)
