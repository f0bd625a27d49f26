"""Linear layers with int4 weights that TensorRT makes float again inside the product's kernel."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, SharedResults, constant, lazy_weight
from specexport.passes.base import CountingPass, Quantizing
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites, replace_site
from specexport.passes.symmetric_blocks import quantize_blocks, scale_dtype
from specexport_runtime.bundle.quant_kinds import INT4


def passes(given: Quantizing) -> list[CountingPass]:
    """The passes of int4, the one kind that its engines take."""
    return [TensorRtQuantizePass(block=given.form.block, lm_head=given.lm_head)]


class TensorRtQuantizePass(CountingPass):
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
        sites = find_sites(model, INT4.name, lm_head=self._lm_head, multiples=(self._block, 1))
        for site in sites:
            _replace(model.graph, site, self._block)
        return len(sites)


def _replace(graph: ir.Graph, site: LinearSite, block: int) -> None:
    dtype, name = site.tensor.dtype, f"{site.weight.name}.{INT4.name}"
    made = SharedResults(partial(_quantize_weight, site.tensor, site.turned, block))
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
    replace_site(emit, site, result)


def _quantize_weight(tensor: ir.TensorProtocol, turned: bool, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [K, N] and scales [K / block, N] of a matrix; some outputs at a time, to save memory."""
    rounded = scale_dtype(tensor.dtype)
    parts = (quantize_blocks(part.T.astype(np.float32), block, rounded) for part in channel_parts(tensor, turned))
    codes, scales = (np.concatenate(found, axis=1) for found in zip(*parts, strict=True))
    return codes, scales.astype(tensor.dtype.numpy())
