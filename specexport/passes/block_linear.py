"""Linear layers and embeddings with packed weights, as our own operators for CPUs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, lazy_weight
from specexport.ops.spec import EACH
from specexport.passes.base import AS_STORED, find_constant, read_sizes
from specexport.passes.block_format import choose_format, pack, pack_float, packed_shape
from specexport.passes.block_weight import BlockWeight
from specexport.passes.experts_graph import BLOCK_EXPERTS
from specexport.passes.quantize_sites import BLOCK_LINEAR, LinearSite, channel_parts
from specexport.passes.transpose_fold import FOLDED
from specexport_runtime.abi import OP_DOMAIN
from specexport_runtime.bundle.entry import WeightFormat

BLOCK_EMBEDDING = "BlockEmbedding"
_FLOAT = ir.DataType.FLOAT


class Packing(NamedTuple):
    """A weight [N, K] that will be packed when the engine is written."""

    format: str  # see ``block_format``
    shape: tuple[int, int]  # N and K; K may be filled up to whole blocks
    make: Callable[[], np.ndarray]  # gives it packed, uint8 [times * tiles, bytes of a tile]
    times: int = 1  # how many such weights lie one below the other


def pack_blocks(weight: BlockWeight) -> Packing:
    """A weight of integers in blocks, as it is."""
    kind = choose_format(weight)
    return Packing(kind, weight.shape, partial(pack, kind, weight))


def pack_floats(tensor: ir.TensorProtocol, *, turned: bool) -> Packing:
    """A float weight in the narrowest type that holds its values exactly; [N, K] if ``turned``, else [K, N]."""
    sizes = read_sizes(tensor)
    width, depth = sizes if turned else sizes[::-1]
    kind = find_narrowest_format(channel_parts(tensor, turned))
    return Packing(kind, (width, depth), lambda: pack_float(kind, channel_parts(tensor, turned), width, depth))


def find_narrowest_format(parts: Iterable[np.ndarray]) -> str:
    """The shortest format of floats that holds each value exactly."""
    kinds = ["bf16", "f16"]
    for part in parts:
        values = np.ascontiguousarray(part, np.float32)
        if "bf16" in kinds and bool((values.view(np.uint32) & np.uint32(0xFFFF)).any()):
            kinds.remove("bf16")
        if "f16" in kinds and "bf16" not in kinds:
            with np.errstate(over="ignore"):
                same = values.astype(np.float16).astype(np.float32) == values
            if not bool(same.all()):
                kinds.remove("f16")
        if not kinds:
            return "f32"
    return kinds[0]


def replace_linear(graph: ir.Graph, site: LinearSite, packing: Packing) -> None:
    """Replace a layer, and the bias after it, by one ``BlockLinear``."""
    emit, old, bias = Emitter(graph), site.node, site.bias
    added = _find_bias_add(site) if bias is None else None
    end = old.outputs[0] if added is None else added.outputs[0]
    if added is not None:
        bias = next(value for value in added.inputs if value is not old.outputs[0])
    result = emit_block_linear(emit, site.source, str(site.weight.name), packing, bias, depth=site.depth)
    result.shape = end.shape
    emit.place(before=old)
    name, end.name = end.name, None
    ir.convenience.replace_all_uses_with(end, result, replace_graph_outputs=True)
    graph.remove([old] if added is None else [added, old], safe=True)
    result.name = name


def emit_block_linear(
    emit: Emitter,
    source: ir.Value,
    name: str,
    packing: Packing,
    bias: ir.Value | None = None,
    *,
    depth: int | None = None,  # K, where the weight is filled up to whole blocks
) -> ir.Value:
    """One ``BlockLinear``: float32 ``source`` [..., K] and ``bias`` [N] to float32 [..., N], without a shape."""
    width, stored = packing.shape
    return emit.op(
        BLOCK_LINEAR,
        source,
        add_packed_weight(emit.graph, name, packing),
        *([] if bias is None else [bias]),
        dtype=_FLOAT,
        domain=OP_DOMAIN,
        format=packing.format,
        K=stored if depth is None else depth,
        N=width,
    )


def replace_lookup(graph: ir.Graph, node: ir.Node, packing: Packing) -> None:
    """Replace a ``Gather`` of rows of a table [N, K] by ``BlockEmbedding``; a tied LM head has the same weight."""
    emit, (table, ids) = Emitter(graph), node.inputs[:2]
    num_rows, width = read_sizes(find_constant(table))  # type: ignore[arg-type]
    packed = add_packed_weight(graph, str(table.name), packing)  # type: ignore[union-attr]
    found = emit.op(
        BLOCK_EMBEDDING,
        ids,
        packed,
        dtype=_FLOAT,
        shape=node.outputs[0].shape,
        domain=OP_DOMAIN,
        format=packing.format,
        K=width,
        N=num_rows,
    )
    emit.replace(node, [found])


def packed_formats(graph: ir.Graph) -> tuple[WeightFormat, ...]:
    """Each format of packed weights: its name, weights and bytes, the most weights first; a tied weight counts once."""
    seen = {}
    for node in graph.all_nodes():
        for at, kind, size in _find_packed_weights(node):
            tensor = find_constant(node.inputs[at])
            if tensor is not None:
                seen[tensor.name] = node.attributes[kind].as_string(), size, tensor.nbytes
    found: dict[str, tuple[int, int]] = {}
    for kind, size, stored in seen.values():
        count, total = found.get(kind, (0, 0))
        found[kind] = count + size, total + stored
    formats = (WeightFormat(kind, *sizes) for kind, sizes in found.items())
    return tuple(sorted(formats, key=lambda each: -each.weights))


def _find_packed_weights(node: ir.Node) -> list[tuple[int, str, int]]:
    """The packed weights of a node: which inputs they are, the attributes of their formats, and how many weights."""
    if node.domain != OP_DOMAIN:
        return []
    number = {name: value.value for name, value in node.attributes.items()}
    if node.op_type in (BLOCK_LINEAR, BLOCK_EMBEDDING):
        return [(1, "format", number["K"] * number["N"])]
    if node.op_type != BLOCK_EXPERTS:
        return []
    one = number["E"] * number["H"] * number["I"]
    gates = one if number["interleaved"] == EACH else 2 * one
    return [(3, "gate_up_format", gates), (5, "down_format", one)]


def add_packed_weight(graph: ir.Graph, name: str, packing: Packing) -> ir.Value:
    """A weight of an engine, packed when that is written; the same one for the same name and format."""
    stored = f"{name.removesuffix(FOLDED)}.blocks.{packing.format}"
    tiles, tile_bytes = packed_shape(packing.format, *packing.shape)
    shape = (packing.times * tiles, tile_bytes)
    value = lazy_weight(graph, stored, ir.DataType.UINT8, shape, packing.make)
    value.meta[AS_STORED] = True
    return value


def _find_bias_add(site: LinearSite) -> ir.Node | None:
    """The addition of a constant [N] that alone reads what the layer gives."""
    out = site.node.outputs[0]
    uses = list(out.uses())
    if len(uses) != 1 or out.is_graph_output() or uses[0].node.op_type != "Add" or uses[0].node.domain != "":
        return None
    tensor = find_constant(uses[0].node.inputs[1 - uses[0].idx])
    return uses[0].node if tensor is not None and tuple(tensor.shape) == (site.width,) else None
