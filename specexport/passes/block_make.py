"""Float weights rounded to integers in blocks.

Scales and zero points of 4 bits are searched for instead of taken from the extremes, where inputs were measured.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.channel_ranges import FloatVector
from specexport.onnx_emit import part_of
from specexport.passes.base import read_sizes
from specexport.passes.block_weight import BlockForm, Blocks, BlockWeight, Rows, ScaleLayout, StoredScales
from specexport.passes.quantize_sites import channel_parts, make_too_large_error, round_scales
from specexport_runtime.executors.base import Float32Array

BLOCK = 32
INT8, INT4 = "int8", "group4_32_f16_zero"
"""Formats of weights that are rounded here."""
IN_SINGLE = {INT8: "group8_32_f32", INT4: "group4_32_f32_zero"}
"""The same with float32 scales, for weights that are too small or too large for the others."""
_LARGEST, _ZERO = 127, 128
_LEAST, _MOST = 2.0**-20, float(np.finfo(np.float16).max)
"""Scales of float16 below the least have so few bits that codes would be more than a sixteenth coarser."""

Coded = tuple[np.ndarray, np.ndarray, np.ndarray]
LEVELS = 15
_ENDS = ((1.0, 1.0), (0.9, 0.9), (0.8, 0.8), (0.7, 0.7), (0.85, 1.0), (1.0, 0.85))
"""Shares of a block's least and largest weight that are tried as the ends of its codes."""
_CHUNK = 1 << 16  # weights worked on at a time: what is computed from them stays in the processor's cache


def int8_weight(tensor: ir.TensorProtocol, *, turned: bool, half: bool | None = None) -> BlockWeight:
    """Codes of 8 bits and a float16 scale for every 32 inputs: ``value = scale * (code - 128)``.

    The scale is the block's largest magnitude over 127, rounded up, and codes are chosen by it as it is stored. The
    float weight is [N, K] if it is ``turned``, else [K, N]; K is filled up with zeros. Scales are float32 if ``half``
    is False, or None and a block is too small or too large for float16.
    """
    form = BlockForm(8, BLOCK, has_offsets=False)
    half = fits_half(channel_parts(tensor, turned), INT8) if half is None else half
    kind, spread = (INT8, ScaleLayout(BLOCK)) if half else (IN_SINGLE[INT8], None)
    return _round_weight("int8", kind, form, tensor, turned, partial(_eight_bits, half), spread)


def int4_weight(
    tensor: ir.TensorProtocol, *, turned: bool, importance: FloatVector | None, half: bool | None = None
) -> BlockWeight:
    """Codes of 4 bits, and a float16 scale and a zero point for every 32 inputs: ``value = scale * (code - zero)``.

    The float weight is as in :func:`int8_weight`. With the ``importance`` of each input, float32 [K], scales and zero
    points are searched for; None takes a block's extremes.
    """
    form = BlockForm(4, BLOCK, has_offsets=True)
    half = fits_half(channel_parts(tensor, turned), INT4) if half is None else half
    kind = INT4 if half else IN_SINGLE[INT4]
    return _round_weight("int4", kind, form, tensor, turned, partial(_four_bits, importance, half))


def fits_half(parts: Iterable[np.ndarray], format: str) -> bool:  # noqa: A002
    """Whether the scales of a float matrix, [n, K] at a time, keep their precision in float16."""
    steps = _LARGEST if format == INT8 else LEVELS
    for part in parts:
        sizes = np.abs(np.ascontiguousarray(part, np.float32))
        largest = np.maximum.reduceat(sizes, range(0, sizes.shape[1], BLOCK), axis=1) / np.float32(steps)
        # A scale of 4 bits reaches from the least weight to the largest: up to twice as far.
        if not float(largest.max(initial=0)) <= _MOST / 2 or ((largest > 0) & (largest < _LEAST)).any():
            return False
    return True


def _round_weight(
    kind: str,
    format: str,  # noqa: A002
    form: BlockForm,
    tensor: ir.TensorProtocol,
    turned: bool,
    make: Callable[[Float32Array], Blocks],
    spread: ScaleLayout | None = None,
) -> BlockWeight:
    axis = 0 if turned else 1
    sizes = read_sizes(tensor)
    width, depth = sizes[axis], -(-sizes[1 - axis] // BLOCK) * BLOCK

    def read(rows: Rows) -> Blocks:
        start, stop = int(rows.min()), int(rows.max()) + 1
        part = part_of(tensor, axis, start, stop)
        channels = (part if turned else part.T)[rows - start]
        values = np.zeros((len(rows), depth), np.float32)
        values[:, : channels.shape[1]] = channels
        return make(values.reshape(len(rows), -1, BLOCK))

    return BlockWeight(kind, form, (width, depth), tensor.nbytes, read, spread, format)


def _eight_bits(half: bool, values: Float32Array) -> Blocks:
    largest = np.abs(values).max(axis=2) / np.float32(_LARGEST)
    base = round_up_to_half(largest) if half else round_scales(largest, np.float32, _LARGEST)
    scales = base.astype(np.float32)
    codes = np.rint(values / np.where(scales > 0, scales, np.float32(1))[..., None]) + _ZERO
    return Blocks(codes.astype(np.uint8).reshape(len(values), -1), scales, None, StoredScales(base) if half else None)


def _four_bits(importance: FloatVector | None, half: bool, values: Float32Array) -> Blocks:
    if importance is None:
        codes, scales, zeros = quantize_by_extremes(values, half)
    else:
        weights = np.zeros(values.shape[1] * BLOCK, np.float32)
        weights[: len(importance)] = importance
        codes, scales, zeros = search_blocks(values, weights.reshape(-1, BLOCK), half)
    offsets = scales * (np.float32(8) - zeros.astype(np.float32))
    return Blocks(codes.reshape(len(values), -1), scales, offsets)


def round_up_to_half(scales: Float32Array) -> np.ndarray:
    """The least float16 that is no smaller; raises ``UnsupportedModelError`` where there is none."""
    if scales.size and not float(scales.max()) <= _MOST:
        raise make_too_large_error(scales.max() * _LARGEST)
    near = scales.astype(np.float16)
    low = near.astype(np.float32) < scales
    up: np.ndarray = np.where(low, np.nextafter(near, np.float16(np.inf)), near)
    return up


def search_blocks(values: Float32Array, importance: Float32Array, half: bool = True) -> Coded:
    """Codes, scales and zero points that lose little of what a layer computes: ``value = (code - zero) * scale``.

    A block's result is off by the sum of ``x * (w - w')``, so what is made small is ``sum E[x^2] (w - w')^2``, with the
    mean squares of the inputs as measured on texts (the importance matrix of llama.cpp; the diagonal of the Hessian in
    Frantar et al. 2023, section 3.1). Several ends are tried. For each, codes are rounded, and the best scale for these
    codes is known: with ``q = code - zero`` it is ``sum E w q / sum E q^2``, and lowers the loss by ``(sum E w q)^2 /
    sum E q^2``. The end that lowers it most stays, and codes are rounded once more in its scale. Ends cut off lose one
    large weight, and give all others finer steps. Values are [N, blocks, block], their importance is [blocks, block],
    not negative. Codes are uint8 [N, blocks, block], scales float32 [N, blocks] that are exact in float16 if
    they shall be ``half``, zero points uint8 [N, blocks].
    """
    width, blocks, block = values.shape
    codes = np.empty(values.shape, np.uint8)
    scales, zeros = np.empty((width, blocks), np.float32), np.empty((width, blocks), np.uint8)
    step = max(1, _CHUNK // max(1, blocks * block))
    # A block whose inputs were zero on all texts is rounded as if they were alike.
    weights = np.maximum(importance, np.maximum(importance.mean(axis=-1, keepdims=True) * 1e-3, 1e-12))
    for start in range(0, width, step):
        part = slice(start, start + step)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused as scales are stored
            codes[part], scales[part], zeros[part] = _search(values[part], weights.astype(np.float32), half)
    return codes, scales, zeros


def quantize_by_extremes(values: Float32Array, half: bool = True) -> Coded:
    """Codes, scales and zero points that reach from each block's least weight to its largest; see above for shapes."""
    with np.errstate(invalid="ignore"):  # what is no number is refused as scales are stored
        scales, zeros = _between(*_find_block_extremes(values))
    scales = _round_stored_scales(scales, half)
    codes = _quantize_steps(values, scales, zeros) + zeros[..., None]
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)


def _find_block_extremes(values: Float32Array) -> tuple[np.ndarray, np.ndarray]:
    # Zero is always a code: filling and zeros of the weight stay exact.
    return np.minimum(values.min(axis=2), 0), np.maximum(values.max(axis=2), 0)


def _between(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points of codes that reach from ``low`` to ``high``."""
    scales = (high - low) / np.float32(LEVELS)
    scales = np.where(scales == 0, np.float32(1), scales)
    return scales, np.clip(np.rint(-low / scales), 0, LEVELS)


def _search(values: Float32Array, weights: Float32Array, half: bool) -> Coded:
    low, high = _find_block_extremes(values)
    weighted = values * weights
    best = np.full(low.shape, -1, np.float32)
    scales, zeros = np.ones(low.shape, np.float32), np.zeros(low.shape, np.float32)
    for low_share, high_share in _ENDS:
        scale, zero = _between(low * np.float32(low_share), high * np.float32(high_share))
        steps = _quantize_steps(values, scale, zero)
        along = np.einsum("nbk,nbk->nb", weighted, steps)
        square = np.einsum("nbk,nbk,bk->nb", steps, steps, weights)
        fitted = along / np.where(square > 0, square, 1)
        gain = np.where(fitted > 0, along * fitted, 0)
        better = gain > best
        best = np.where(better, gain, best)
        scales = np.where(better, np.where(fitted > 0, fitted, scale), scales)
        zeros = np.where(better, zero, zeros)
    scales = _round_stored_scales(scales, half)
    return _quantize_steps(values, scales, zeros) + zeros[..., None], scales, zeros


def _round_stored_scales(scales: np.ndarray, half: bool) -> Float32Array:
    """As engines store them: codes are chosen by that. ``UnsupportedModelError`` where they are beyond the type."""
    number, least = (np.float16, 2.0**-24) if half else (np.float32, 2.0**-126)  # the inverse is finite
    return np.maximum(round_scales(scales, number, LEVELS), np.float32(least))


def _quantize_steps(values: Float32Array, scales: np.ndarray, zeros: np.ndarray) -> Float32Array:
    """Codes less the zero point, as float32."""
    steps = values * (1 / scales)[..., None]
    np.rint(steps, out=steps)
    np.maximum(steps, -zeros[..., None], out=steps)
    found: Float32Array = np.minimum(steps, (LEVELS - zeros)[..., None], out=steps)
    return found
