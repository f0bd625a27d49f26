"""The graph for steps of one new token a row, all of them with logits: what a draft model does nearly always.

With one token a row nothing is ragged: one fused kernel takes all rows at once, each with a past of its own, and no
step input but tokens and lengths is needed. That kernel takes its caches without the second dimension that the graph
for any step has, so that graph inputs are declared without it here, and bound to the same memory.
"""

from typing import TYPE_CHECKING

from specexport.lowering.functions import INT8_KV_ATTRIBUTES
from specexport.lowering.fuse import packed_qkv, remove_dead_nodes, rotary_kind
from specexport.lowering.int8_kv import has_int8_caches
from specexport.lowering.ort_cpu import choose_body, head_dim, named_inputs
from specexport.lowering.shared_kv import appends
from specexport.lowering.slopes import slopes_of
from specexport.lowering.step_inputs import drop_unused_step_inputs
from specexport.onnx_emit import Emitter
from specexport_runtime.abi import KV_LENS, LOGIT_ROWS, OP_DOMAIN, OP_NAME, ROW_TOTALS

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
_V_CACHE = 4


def lower_one_token(ir_model: "ir.Model") -> bool:
    """Make the graph for steps of one token a row, in place.

    Args:
        ir_model: the traced model, after the passes and, if rotary embeddings are fused, after that.

    Returns:
        whether it was done; False, with nothing changed, where the fused kernel cannot do an attention, where layers
        keep a state, where scores are biased by distance, or where caches are another model's.
    """
    ours = [node for node in ir_model.graph if node.domain == OP_DOMAIN]
    nodes = [node for node in ours if node.op_type == OP_NAME]
    fused = all(appends(node) and choose_body(node).fused and slopes_of(node) is None for node in nodes)
    if not nodes or len(ours) > len(nodes) or not fused:
        return False
    total = _longest(ir_model)
    for node in nodes:
        _attend(ir_model, node, total)
    _logits_of_all(ir_model)
    ir_model.opset_imports.setdefault(_CONTRIB, 1)
    remove_dead_nodes(ir_model)
    drop_unused_step_inputs(ir_model)
    return True


def _input(ir_model: "ir.Model", name: str) -> "ir.Value":
    return next(value for value in ir_model.graph.inputs if value.name == name)


def _longest(ir_model: "ir.Model") -> "ir.Value":
    """Entries of the longest row after the step, which the kernel tells a prompt's beginning by."""
    emit = Emitter(ir_model.graph, "one_token")
    total = emit.op("ReduceMax", _input(ir_model, ROW_TOTALS.name), keepdims=0)
    emit.place(before=ir_model.graph[0])
    return total


def _attend(ir_model: "ir.Model", node: "ir.Node", total: "ir.Value") -> None:
    """Put the fused kernel, over all rows at once, in the place of one attention node."""
    import onnx_ir as ir

    name = f"{node.name}.one_token"
    emit = Emitter(ir_model.graph, name)
    inputs = _inputs(ir_model, node, total, emit)
    kind, attributes = "GroupQueryAttention", _attributes(node)
    fused = emit.node(kind, inputs, attributes, outputs=3, domain=_CONTRIB, name=f"{name}.attention")
    for new, old in zip(fused.outputs, node.outputs, strict=True):
        new.type = old.type
    heads = node.attributes["num_heads"].as_int()
    _replace_attended(node.outputs[0], fused.outputs[0], heads * head_dim(node, node.inputs[_V_CACHE]), emit)
    emit.place(before=node)
    for index, (old, new) in enumerate(zip(node.outputs[1:], fused.outputs[1:], strict=True), start=_V_CACHE - 1):
        new.shape = _without_axis(node.inputs[index].shape)  # type: ignore[union-attr]
        node.inputs[index].shape = new.shape  # type: ignore[union-attr]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = old.name
    ir_model.graph.remove(node, safe=True)


def _inputs(ir_model: "ir.Model", node: "ir.Node", total: "ir.Value", emit: Emitter) -> "list[ir.Value | None]":
    """The kernel's inputs; q, k and v as one where they come from one tensor."""
    given, packed = named_inputs(node), packed_qkv(node)
    dim = head_dim(node, given["k_cache"])
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    parts = [(given["q"], heads), (given["k"], kv_heads), (given["v"], kv_heads)]
    if packed is not None:
        parts = [(packed, heads + 2 * kv_heads)]
    tokens = [emit.op("Reshape", part, emit.const([-1, 1, count * dim])) for part, count in parts]
    inputs = [
        *[*tokens, None, None][:3],
        *(given["k_cache"], given["v_cache"], _input(ir_model, KV_LENS.name), total),
        *(given.get("cos_table"), given.get("sin_table"), None, None, given.get("sinks")),
        *(given.get("k_scale"), given.get("v_scale")),
    ]
    while inputs[-1] is None:
        inputs.pop()
    return inputs


def _attributes(node: "ir.Node") -> "dict[str, int | float | str]":
    kind = rotary_kind(node)
    return {
        **{name: node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")},
        **{name: node.attributes[name].as_float() for name in ("scale", "softcap")},
        "local_window_size": node.attributes["window"].as_int(),
        "do_rotary": int(bool(kind)),
        "rotary_interleaved": int(kind == "interleaved"),
        **(INT8_KV_ATTRIBUTES if has_int8_caches(node) else {}),
    }


def _without_axis(shape: "ir.Shape | None") -> "ir.Shape":
    """[B, H, L, D] of [B, 1, H, L, D]."""
    import onnx_ir as ir

    dims = list(shape or ())
    return ir.Shape([dims[0], *dims[2:]])


def _replace_attended(old: "ir.Value", new: "ir.Value", width: int, emit: Emitter) -> None:
    """Give the readers of ``old`` [T, W] what the kernel made, [T, 1, W]; those that reshape it take it as it is."""
    flat = None
    for node, index in [*old.uses()]:
        shape = node.inputs[1] if node.op_type == "Reshape" and index == 0 else None
        if shape is None or shape.const_value is None or 0 in shape.const_value.numpy():
            flat = flat or emit.op("Reshape", new, emit.const([-1, width]))
            flat.shape = old.shape
            node.replace_input_with(index, flat)
        else:
            node.replace_input_with(index, new)


def _logits_of_all(ir_model: "ir.Model") -> None:
    """Take out the choice of tokens that get logits: all do, in their order."""
    import onnx_ir as ir

    for node, index in [*_input(ir_model, LOGIT_ROWS.name).uses()]:
        rows = node.inputs[0]
        if node.op_type == "Gather" and index == 1 and rows is not None and node.attributes.get_int("axis", 0) == 0:
            ir.convenience.replace_all_uses_with(node.outputs[0], rows)
            ir_model.graph.remove(node, safe=True)
