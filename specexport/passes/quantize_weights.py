"""Linear layers with int4 weights that the graph makes float again: TensorRT fuses that with the product."""

from functools import partial

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.onnx_emit import Emitter, Together, constant, lazy_weight
from specexport.passes.base import CountingPass
from specexport.passes.quantize_graph import put_in_place
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites

_LEAST, _MOST = -8, 7
_SHRINK = (1.0, 0.93, 0.86, 0.79)
"""Shares of a block's largest weight that are tried as the largest code: the one with the least squared error stays."""


class Int4WeightPass(CountingPass):
    """Store weights in 4 bits, symmetric, with a scale for every block of inputs of each output.

    ::

        MatMul(x, W)   becomes   MatMul(x, DequantizeLinear(codes [K, N], scales [K / block, N]))

    Activations keep their type. A layer whose inputs the block does not divide keeps its weights. The LM head is taken
    too, unless asked otherwise. Counts the layers. (Float8 weights are not offered: TensorRT-RTX 1.7 makes most of them
    float in separate kernels, in every step, which reads more memory than weights that are float already.)
    """

    name = "int4-weights"
    reason = "memory: a GPU reads a quarter of the bytes, and makes them float inside the product's kernel"

    def __init__(self, *, block: int, lm_head: bool) -> None:
        self._block, self._lm_head = block, lm_head  # block: inputs that share a scale

    def rewrite(self, model: ir.Model) -> int:
        """Quantize every linear layer whose inputs the block divides; UnsupportedModelError as in ``find_sites``."""
        sites = find_sites(model, "int4", lm_head=self._lm_head, multiples=(self._block, 1))
        for site in sites:
            _replace(model.graph, site, self._block)
        return len(sites)


def _replace(graph: ir.Graph, site: LinearSite, block: int) -> None:
    dtype, name = site.tensor.dtype, f"{site.weight.name}.int4"
    made = Together(partial(_parts, site.tensor, site.turned, block))
    sizes, scale_sizes = [site.depth, site.width], [site.depth // block, site.width]
    codes = lazy_weight(graph, name, ir.DataType.INT4, sizes, partial(made.part, 0))
    scales = lazy_weight(graph, f"{name}_scale", dtype, scale_sizes, partial(made.part, 1))
    emit = Emitter(graph)
    weight = emit.op("DequantizeLinear", codes, scales, dtype=dtype, shape=sizes, axis=0, block_size=block)
    source, shape = site.source, site.node.outputs[0].shape
    if source.shape is not None and len(source.shape) == 3:  # [1, T, K]: the weight would be kept twice
        tokens = source.shape[1]
        depths = constant(graph, f"{name}.flat", np.array([-1, site.depth], np.int64))
        flat = emit.op("Reshape", source, depths, dtype=dtype, shape=[tokens, site.depth])
        product = emit.op("MatMul", flat, weight, dtype=dtype, shape=[tokens, site.width])
        widths = constant(graph, f"{name}.batch", np.array([1, -1, site.width], np.int64))
        result = emit.op("Reshape", product, widths, dtype=dtype, shape=shape)
    else:
        result = emit.op("MatMul", source, weight, dtype=dtype, shape=shape)
    put_in_place(emit, site, result)


def _parts(tensor: ir.TensorProtocol, turned: bool, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [K, N] and scales [K / block, N] of a matrix; some outputs at a time, to save memory."""
    rounded = scale_dtype(tensor.dtype)
    parts = (quantize_blocks(part.T.astype(np.float32), block, rounded) for part in channel_parts(tensor, turned))
    codes, scales = (np.concatenate(found, axis=1) for found in zip(*parts, strict=True))
    return codes, scales.astype(tensor.dtype.numpy())


def scale_dtype(weight: ir.DataType) -> np.dtype:
    """What scales are rounded to before codes are chosen: bfloat16 beside such weights, else float16."""
    return (ir.DataType.BFLOAT16 if weight == ir.DataType.BFLOAT16 else ir.DataType.FLOAT16).numpy()


def quantize_blocks(
    matrix: np.ndarray, block: int, rounded: npt.DTypeLike = np.float16
) -> tuple[np.ndarray, np.ndarray]:
    """Codes int4 [K, N] from -8 to 7 and scales of a float32 matrix [K, N]: ``value = code * scale``.

    The largest weight of a block is given -8, the code that has no opposite; or the scale is a little smaller, where
    that costs less over the block. Scales are float32 [K / block, N], some negative, and are rounded to the dtype
    ``rounded`` before the codes are chosen. ``block`` divides K.
    """
    depth, width = matrix.shape
    values = matrix.reshape(depth // block, block, width)
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    tried = [_round_to(values, largest * np.float32(share / _LEAST), rounded) for share in _SHRINK]
    best = np.argmin([error for _, _, error in tried], axis=0)
    codes = np.choose(best, [found for found, _, _ in tried])
    scales = np.choose(best, [scale for _, scale, _ in tried])
    return codes.reshape(depth, width).astype(ml_dtypes.int4), scales[:, 0]


def _round_to(
    values: np.ndarray, scales: np.ndarray, rounded: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of blocks [n, block, N] with given scales [n, 1, N], the scales as they are stored, and squared errors."""
    scales = scales.astype(rounded).astype(np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    codes = np.clip(np.rint(values / scales), _LEAST, _MOST)
    return codes, scales, np.square(codes * scales - values).sum(axis=1, keepdims=True)
