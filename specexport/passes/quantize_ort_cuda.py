"""Linear layers with int4 weights that ONNX Runtime's kernel for GPUs makes float as it multiplies."""

from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.onnx_emit import Emitter, SharedResults, lazy_weight
from specexport.passes.base import CountingPass, Quantizing, find_constant
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites, replace_site
from specexport.passes.symmetric_blocks import quantize_blocks, scale_dtype
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.quant_kinds import INT4

_CONTRIB, _NBITS = "com.microsoft", "MatMulNBits"
_ZERO = 8
_ALIGNED = 8
"""The kernel takes inputs and outputs in eights. Other layers would be made float in every step, into memory."""


def passes(given: Quantizing) -> list[CountingPass]:
    """The passes of int4, the one kind that the kernel takes."""
    return [OrtCudaQuantizePass(block=given.form.block, lm_head=given.lm_head)]


class OrtCudaQuantizePass(CountingPass):
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
        sites = find_sites(model, INT4.name, lm_head=self._lm_head, multiples=(_ALIGNED, _ALIGNED))
        for site in sites:
            _replace(model.graph, site, self._block)
        model.opset_imports.setdefault(_CONTRIB, 1)
        return len(sites)


def _replace(graph: ir.Graph, site: LinearSite, block: int) -> None:
    blocks, dtype, name = -(-site.depth // block), site.tensor.dtype, f"{site.weight.name}.{INT4.name}"
    made = SharedResults(partial(_pack_weight, site.tensor, site.turned, block))
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
    replace_site(emit, site, result)


def _pack_weight(tensor: ir.TensorProtocol, turned: bool, block: int) -> tuple[np.ndarray, np.ndarray]:
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
    found = {
        value: tensor for node in nodes for value in node.inputs[1:] if (tensor := find_constant(value)) is not None
    }
    stored = sum(tensor.nbytes for tensor in found.values())
    elements = sum(node.attributes["K"].as_int() * node.attributes["N"].as_int() for node in nodes)
    return stored, elements * ITEM_BYTES[dtype]
