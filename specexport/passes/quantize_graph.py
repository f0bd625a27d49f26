"""What quantizing passes do to a graph in the same way."""

from collections.abc import Sequence as Seq

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter
from specexport.passes.base import constant_of
from specexport.passes.quantize_sites import LinearSite
from specexport_runtime.abi import ITEM_BYTES

CONTRIB = "com.microsoft"
NBITS = "MatMulNBits"


def put_in_place(emit: Emitter, site: LinearSite, result: ir.Value) -> None:
    """Add the layer's bias to ``result``, hand it to whoever read the layer, and drop the layer.

    Args:
        emit: what has emitted ``result``; its nodes go where the layer was.
        site: the layer.
        result: its product.
    """
    old = site.node.outputs[0]
    if site.bias is not None:
        result = emit.op("Add", result, site.bias)
    emit.place(before=site.node)
    name, result.shape = old.name, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    emit.graph.remove(site.node, safe=True)
    old.name = None
    result.name = name


def put_nbits(
    graph: ir.Graph, site: LinearSite, weights: Seq[ir.Value], *, block: int, accuracy_level: int, bits: int = 4
) -> None:
    """Replace a layer by ``com.microsoft.MatMulNBits``.

    Args:
        graph: the layer's graph.
        site: the layer.
        weights: codes, uint8 [N, blocks, block * bits / 8], 4 bits two to a byte; scales [N * blocks] in the dtype of
            what the layer reads; zero points, two to a byte, uint8 [N * ceil(blocks / 2)], or none: then the zero is
            code 8, of 8 bits 128.
        block: inputs that share a scale.
        accuracy_level: 0 lets activations be.
        bits: of a code, 4 or 8.
    """
    emit = Emitter(graph)
    result = emit.op(
        NBITS,
        site.source,
        *weights,
        dtype=site.tensor.dtype,
        shape=site.node.outputs[0].shape,
        domain=CONTRIB,
        K=site.depth,
        N=site.width,
        bits=bits,
        block_size=block,
        accuracy_level=accuracy_level,
    )
    put_in_place(emit, site, result)


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """Codes from 0 to 15, uint8 [..., 2 n], two to a byte [..., n]: the first in the low half."""
    packed: np.ndarray = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed


def nbits_bytes(graph: ir.Graph, dtype: str) -> tuple[int, int]:
    """Bytes of the weights of all ``MatMulNBits``, with their scales, and in ``dtype``.

    Args:
        graph: a model's.
        dtype: numpy name, for example ``"float16"``.
    """
    nodes = [node for node in graph.all_nodes() if node.op_type == NBITS]
    found = {value: tensor for node in nodes for value in node.inputs[1:] if (tensor := constant_of(value)) is not None}
    stored = sum(tensor.nbytes for tensor in found.values())
    elements = sum(node.attributes["K"].as_int() * node.attributes["N"].as_int() for node in nodes)
    return stored, elements * ITEM_BYTES[dtype]
