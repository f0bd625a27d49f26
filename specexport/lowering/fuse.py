"""Rotary embeddings into attention nodes, and residual additions into the norms after them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport.lowering.common import is_causal
from specexport.onnx_emit import Emitter, constant, set_inputs
from specexport.ops.spec import UNPADDED_ATTENTION
from specexport.passes.base import CountingPass, Rewrite, attention_nodes
from specexport_runtime.abi import kv_slack

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.lowering.fuse_region import Region, RegionProbe, Rotation

ROTARY_ATTRIBUTE = "rotary_interleaved"
"""Marks an attention node that rotates q and k by two tables after its other inputs; 1 if pairs are neighbours."""
ROTARY_INPUTS = (len(UNPADDED_ATTENTION.inputs), len(UNPADDED_ATTENTION.inputs) + 1)
"""Which inputs of the node are the tables: cosine and sine, in the type of q, [rows, rotary_dim / 2]."""

_COMMON_LEN = 4096
_MAX_LOOKAHEAD = 64
_MIN_TABLE_BYTES = 2 * 2**20
_TABLE_SHARE = 25
_ROW_PERM = (0, 2, 1, 3)

_CONTRIB = "com.microsoft"
NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}
"""Norms by the operator of ``com.microsoft`` that adds first."""


def rotary_pass(
    max_model_len: int, max_positions: int | None, takes: "Callable[[ir.Node, Rotation], bool] | None" = None
) -> CountingPass:
    """:func:`fuse_rotary` as a pass of a lowering."""
    fuse = partial(fuse_rotary, rows=rotary_rows(max_model_len, max_positions), limit=max_positions, takes=takes)
    return Rewrite("rotary-fuse", "attention turns q and k as it reads them: a pass over both less a layer", fuse)


def norm_pass() -> CountingPass:
    """:func:`fuse_norms` as a pass of a lowering."""
    return Rewrite("norm-fuse", "an addition and the norm after it are one kernel; gates need them apart", fuse_norms)


def rotary_rows(max_model_len: int, max_positions: int | None) -> int:
    """Rows of the rotary tables: as many as a cache row can ever hold, and the same for all ordinary lengths."""
    length = max(_COMMON_LEN, max_model_len)
    return (length if max_positions is None else min(length, max_positions)) + kv_slack(_MAX_LOOKAHEAD)


class _RotatedSide(NamedTuple):
    """q or k of one attention: what is rotated, and how to run it."""

    region: "Region"
    probe: "RegionProbe"


def fuse_rotary(
    ir_model: "ir.Model",
    rows: int,
    limit: int | None = None,
    takes: "Callable[[ir.Node, Rotation], bool] | None" = None,
) -> int:
    """Move rotary embeddings into the attention nodes of a traced model, in place; returns how many nodes were changed.

    A node is changed only if its q and k are rotated alike, whole heads or their first part, and the tables agree with
    the graph on random vectors. Positions are then the operator's own count of cache entries, which is what they are in
    an unpadded KV cache. All tables together may take 2 MiB or a 25th of the weights, whichever is more; otherwise
    nothing is changed, as the gain does not grow with the model. ``rows`` are those of the tables, from
    ``rotary_rows``. ``limit`` is the number of positions that the model supports, None for no
    limit; rows beyond are never read. ``takes`` says whether a backend's kernel takes a rotation; None: all.
    """
    import onnx_ir as ir

    found = [each for each in _find_rotations(ir_model, rows, limit) if takes is None or takes(each[0], each[2])]
    sizes = {id(rotation): rotation.cos.nbytes + rotation.sin.nbytes for _, _, rotation in found}
    weights = sum(value.const_value.nbytes for value in ir_model.graph.initializers.values() if value.const_value)
    if not found or sum(sizes.values()) > max(_MIN_TABLE_BYTES, weights // _TABLE_SHARE):
        return 0
    flat: dict[ir.Value, ir.Value] = {}  # layers may share their keys (Gemma 3n, Gemma 4)
    for node, sides, rotation in found:
        for index, side in enumerate(sides):
            rotated = side.region.value
            if rotated not in flat:
                flat[rotated] = _emit_flat_root(ir_model, node, side)
            node.replace_input_with(index, flat[rotated])
        set_inputs(node, ROTARY_INPUTS[0], _add_rotary_tables(ir_model, rotation, sides[0].region.value))
        node.attributes.add(ir.AttrInt64(ROTARY_ATTRIBUTE, int(rotation.interleaved)))
    remove_dead_nodes(ir_model)
    return len(found)


def _find_rotations(
    ir_model: "ir.Model", rows: int, limit: int | None
) -> "list[tuple[ir.Node, tuple[_RotatedSide, _RotatedSide], Rotation]]":
    from specexport.lowering.fuse_region import find_region, is_same_rotation, measure_rotation, position_nodes

    graph = ir_model.graph
    order = {node: index for index, node in enumerate(graph)}
    dependent, alone = position_nodes(graph)
    measured: dict[tuple[frozenset[str], int], Rotation | None] = {}
    found = []
    for node in attention_nodes(ir_model):
        if not is_causal(node) or not has_appended_kv(node):  # q and k are then not rotated alike
            continue
        regions = [find_region(value, order, dependent, alone) for value in node.inputs[:2]]  # type: ignore[arg-type]
        sides = _probe_sides(ir_model, node, regions)
        if sides is None:
            continue
        key = (sides[0].region.tables, sides[0].probe.dim)
        if key not in measured:
            measured[key] = measure_rotation(sides[1].probe, rows, limit)
        rotation = measured[key]
        if rotation is None or 2 * rotation.cos.shape[1] > sides[0].probe.dim:
            continue
        if all(is_same_rotation(side.probe, rotation, limit) for side in sides):
            found.append((node, sides, rotation))
    return found


def _probe_sides(
    ir_model: "ir.Model", node: "ir.Node", regions: "list[Region | None]"
) -> tuple[_RotatedSide, _RotatedSide] | None:
    from specexport.lowering.fuse_region import RegionProbe

    keys = node.inputs[3].shape  # type: ignore[union-attr]
    dim = None if keys is None else keys[4]
    if not isinstance(dim, int):
        return None
    sides = []
    for name, region in zip(("num_heads", "kv_num_heads"), regions, strict=True):
        if region is None:
            return None
        try:
            probe = RegionProbe(region, ir_model.opset_imports[""], node.attributes[name].as_int(), dim)
        except ValueError:
            return None
        sides.append(_RotatedSide(region, probe))
    return sides[0], sides[1]


def _emit_flat_root(ir_model: "ir.Model", node: "ir.Node", side: _RotatedSide) -> "ir.Value":
    """The unrotated vectors as [T, heads*D], without a Transpose where there need be none."""
    root, emit = (
        _undo_transpose(ir_model, side.region.root),
        Emitter(ir_model.graph, f"{side.region.value.name}.unrotated"),
    )
    shape, heads, width = list(root.shape or ()), side.probe.heads, side.probe.heads * side.probe.dim
    if len(shape) == 4 and shape[1] == heads:
        root = emit.op("Transpose", root, perm=_ROW_PERM)
    flat = emit.reshape(root, [-1, width])
    flat.shape = side.region.value.shape
    emit.place(before=node)
    return flat


def _undo_transpose(ir_model: "ir.Model", root: "ir.Value") -> "ir.Value":
    """``root`` [1, heads, T, D] as it was by token before a Transpose; a norm over D moves in front of it."""
    node = root.producer()
    if node is None:
        return root
    if _is_head_transpose(node):
        return node.inputs[0]  # type: ignore[return-value]
    turned = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    over_last = node.op_type in NORMS and node.domain == "" and node.attributes.get_int("axis", -1) in (-1, 3)
    if not over_last or turned is None or not _is_head_transpose(turned) or turned.inputs[0].shape is None:  # type: ignore[union-attr]
        return root
    source, emit = turned.inputs[0], Emitter(ir_model.graph)
    moved = emit.node(node.op_type, [source, *node.inputs[1:]], node.attributes, name=f"{node.name}.by_token")
    new = moved.outputs[0]
    new.name, new.type, new.shape = f"{root.name}.by_token", root.type, source.shape  # type: ignore[union-attr]
    emit.place(before=node)
    return new


def _is_head_transpose(node: "ir.Node") -> bool:
    """Whether a node swaps heads and tokens."""
    return node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == _ROW_PERM


def _add_rotary_tables(ir_model: "ir.Model", rotation: "Rotation", rotated: "ir.Value") -> "list[ir.Value]":
    """Both tables in the type of what they turn, to which a model rounds its cosines and sines too."""
    values = []
    for kind, given in (("cos", rotation.cos), ("sin", rotation.sin)):
        array = given if rotated.dtype is None else given.astype(rotated.dtype.numpy())
        known = ir_model.graph.initializers
        taken = [v for n, v in known.items() if n.startswith(f"rotary.{kind}.")]
        same = [v for v in taken if v.const_value is not None and np.array_equal(v.const_value.numpy(), array)]
        if not same:
            same = [constant(ir_model.graph, f"rotary.{kind}.{len(taken)}", array)]
        values.append(same[0])
    return values


def remove_dead_nodes(ir_model: "ir.Model") -> None:
    """Remove the nodes whose results are not read. Weights stay: the padded-KV graph shares them, and may read more."""
    for node in reversed(list(ir_model.graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            ir_model.graph.remove(node, safe=True)


def has_appended_kv(node: "ir.Node") -> bool:
    """Whether an ``UnpaddedAttention`` node appends keys and values to its caches."""
    return node.inputs[1] is not None


def rotary_kind(node: "ir.Node") -> str:
    """How an attention node rotates: ``"half"``, ``"interleaved"``, or empty where it does not."""
    return {-1: "", 0: "half", 1: "interleaved"}[node.attributes.get_int(ROTARY_ATTRIBUTE, -1)]


def find_packed_qkv(tokens: "Sequence[ir.Value | None]") -> "ir.Value | None":
    """The tensor [1, T, W] that q, k and v are split from, with nothing but reshapes between."""
    parts = [skip_reshapes(value) for value in tokens]
    split = None if parts[0] is None else parts[0].producer()
    if split is None or split.op_type != "Split" or len(split.outputs) != 3 or list(split.outputs) != parts:
        return None
    whole = split.inputs[0]
    over_last = split.attributes.get_int("axis", 0) in (-1, 2)
    flat = whole is not None and whole.shape is not None and len(whole.shape) == 3 and whole.shape[0] == 1
    return whole if flat and over_last else None


def skip_reshapes(value: "ir.Value | None") -> "ir.Value | None":
    """What a value is a reshape of, or the value itself: the same numbers in the same order."""
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Reshape", "Squeeze"):
        value = node.inputs[0]
    return value


def fuse_norms(ir_model: "ir.Model") -> int:
    """Join each residual addition of a lowered model with the norm after it, in place; returns how many.

    In 16 bits the joined kernel adds and sums squares in float32 (machine code of onnxruntime-gpu 1.31.1 for sm 90),
    and rounds the sum that goes on. The norm alone reads a rounded sum; both round their result once.
    """
    joined = 0
    for node in [n for n in ir_model.graph if n.op_type in NORMS and n.domain == ""]:
        value = node.inputs[0]
        add = None if value is None else value.producer()
        if add is not None and _can_join(add, node):
            _join_norm(ir_model, add, node)
            joined += 1
    return joined


def _can_join(add: "ir.Node", norm: "ir.Node") -> bool:
    """Whether the addition is of two tensors of one shape [1, T, width], and the norm over its last axis."""
    if add.op_type != "Add" or add.domain != "" or any(out.is_graph_output() for out in add.outputs):
        return False
    shapes = [None if x is None or x.is_initializer() else x.shape for x in add.inputs]
    if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 3 or not isinstance(shapes[0][2], int):
        return False
    weights = [x.shape for x in norm.inputs[1:] if x is not None and x.is_initializer()]
    given = [x for x in norm.inputs[1:] if x is not None]
    whole = len(weights) == len(given) and all(s is not None and list(s) == [shapes[0][2]] for s in weights)
    only_result = all(not out.uses() for out in norm.outputs[1:])
    return whole and only_result and norm.attributes.get_int("axis", -1) in (-1, 2) and _is_float32_norm(norm)


def _is_float32_norm(norm: "ir.Node") -> bool:
    """Whether the norm computes in float32, which is all that the joined operator does."""
    return norm.attributes.get_int("stash_type", 1) == 1


def _join_norm(ir_model: "ir.Model", add: "ir.Node", norm: "ir.Node") -> None:
    import onnx_ir as ir

    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    kind = NORMS[norm.op_type]
    inputs = [*add.inputs, *norm.inputs[1:]]
    emit = Emitter(ir_model.graph)
    new = emit.node(kind, inputs, {"epsilon": epsilon}, outputs=4, domain=_CONTRIB, name=f"{norm.name}.skip")
    outs = {0: norm.outputs[0], 3: add.outputs[0]}
    for index, out in enumerate(new.outputs):
        old = outs.get(index)
        out.name = "" if old is None else old.name
        if old is not None:
            out.type, out.shape = old.type, old.shape
    emit.place(before=add)
    for index, old in outs.items():
        ir.convenience.replace_all_uses_with(old, new.outputs[index])
    ir_model.graph.remove([norm, add], safe=True)
    ir_model.opset_imports.setdefault(_CONTRIB, 1)
