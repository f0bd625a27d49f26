"""Linear layers with int4 weights that a GPU makes float again: in the graph, or as its kernel multiplies.

TensorRT fuses the first with the product; ONNX Runtime's kernel does the second.
"""

from functools import partial

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.onnx_emit import Emitter, Together, constant, lazy_weight
from specexport.passes.base import CountingPass, constant_of
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites
from specexport_runtime.abi import ITEM_BYTES

_LEAST, _MOST = -8, 7
_SHRINK = (1.0, 0.93, 0.86, 0.79)
"""Shares of a block's largest weight that are tried as the largest code: the one with the least squared error stays."""

_CONTRIB, _NBITS = "com.microsoft", "MatMulNBits"
_ZERO = 8
_ALIGNED = 8
"""The kernel takes inputs and outputs in eights. Other layers would be made float in every step, into memory."""


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


class Int4FusedPass(CountingPass):
    """Multiply by weights of 4 bits, symmetric, with a scale for every block of inputs of each output.

    ``com.microsoft.MatMulNBits`` over activations in their own type. No zero points: in 16 bits 8 times a scale is
    exact and other multiples are rounded, and the tensor-core kernel that ONNX Runtime can be told to take knows none.
    A layer whose inputs or outputs are no multiple of 8 keeps its weights. Inputs are filled up to whole blocks. The
    LM head is taken too, unless asked otherwise. Counts the layers.
    """

    name = "int4-fused"
    reason = "memory: a GPU's kernel reads a quarter of the bytes, and makes them float as it multiplies"

    def __init__(self, *, block: int, lm_head: bool) -> None:
        self._block, self._lm_head = block, lm_head  # block: inputs that share a scale

    def rewrite(self, model: ir.Model) -> int:
        """Quantize every linear layer that the kernel takes; UnsupportedModelError as in ``find_sites``."""
        sites = find_sites(model, "int4", lm_head=self._lm_head, multiples=(_ALIGNED, _ALIGNED))
        for site in sites:
            _replace_fused(model.graph, site, self._block)
        model.opset_imports.setdefault(_CONTRIB, 1)
        return len(sites)


def _replace_fused(graph: ir.Graph, site: LinearSite, block: int) -> None:
    blocks, dtype, name = -(-site.depth // block), site.tensor.dtype, f"{site.weight.name}.int4"
    made = Together(partial(_fused_parts, site.tensor, site.turned, block))
    codes = lazy_weight(graph, name, ir.DataType.UINT8, [site.width, blocks, block // 2], partial(made.part, 0))
    scales = lazy_weight(graph, f"{name}_scale", dtype, [site.width * blocks], partial(made.part, 1))
    emit = Emitter(graph)
    result = emit.op(
        _NBITS,
        site.source,
        codes,
        scales,
        dtype=dtype,
        shape=site.node.outputs[0].shape,
        domain=_CONTRIB,
        K=site.depth,
        N=site.width,
        bits=4,
        block_size=block,
        accuracy_level=0,  # lets activations be
    )
    put_in_place(emit, site, result)


def _fused_parts(tensor: ir.TensorProtocol, turned: bool, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [N, blocks, block / 2], and scales [N * blocks]; some outputs at a time, to save memory."""
    rounded = scale_dtype(tensor.dtype)
    parts = (pack_channels(channels, block, rounded) for channels in channel_parts(tensor, turned))
    codes, scales = map(np.concatenate, zip(*parts, strict=True))
    return codes, scales.reshape(-1).astype(tensor.dtype.numpy())


def pack_channels(channels: np.ndarray, block: int, rounded: npt.DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Codes of a float matrix [N, K] as ``MatMulNBits`` has them: ``value = (code - 8) * scale``.

    Codes are uint8 [N, blocks, block / 2], two to a byte, the first in the low half; scales are float32 [N, blocks],
    rounded to the dtype ``rounded``. K is filled up to whole blocks with zeros.
    """
    width, depth = channels.shape
    blocks = -(-depth // block)
    matrix = np.zeros((blocks * block, width), np.float32)
    matrix[:depth] = channels.T
    codes, scales = quantize_blocks(matrix, block, rounded)
    unsigned = (codes.astype(np.int8) + _ZERO).astype(np.uint8).T.reshape(width, blocks, block)
    return pack_pairs(unsigned), np.ascontiguousarray(scales.T)


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """Codes from 0 to 15, uint8 [..., 2 n], two to a byte [..., n]: the first in the low half."""
    packed: np.ndarray = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed


def nbits_bytes(graph: ir.Graph, dtype: str) -> tuple[int, int]:
    """Bytes of the weights of all ``MatMulNBits``: stored, with their scales, and in ``dtype`` (a numpy name)."""
    nodes = [node for node in graph.all_nodes() if node.op_type == _NBITS]
    found = {value: tensor for node in nodes for value in node.inputs[1:] if (tensor := constant_of(value)) is not None}
    stored = sum(tensor.nbytes for tensor in found.values())
    elements = sum(node.attributes["K"].as_int() * node.attributes["N"].as_int() for node in nodes)
    return stored, elements * ITEM_BYTES[dtype]


def put_in_place(emit: Emitter, site: LinearSite, result: ir.Value) -> None:
    """Put a layer's product ``result``, which ``emit`` has emitted, and its bias in the place of the layer."""
    old = site.node.outputs[0]
    if site.bias is not None:
        result = emit.op("Add", result, site.bias)
    emit.place(before=site.node)
    name, result.shape = old.name, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    emit.graph.remove(site.node, safe=True)
    old.name = None
    result.name = name
