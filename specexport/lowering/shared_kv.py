"""Attention over caches of another model on the CPU: nothing is appended, and the graph has no cache outputs.

ONNX Runtime's fused kernel takes keys and values of no tokens beside a past: it then attends to the past alone, its
last entries standing for the queries. The caches go in and never come out, so what the other model has in them is safe
whatever this graph computes.
"""

from typing import TYPE_CHECKING

from specexport.lowering.functions import fused_takes, parse_function
from specexport.lowering.slopes import refuse_slopes
from specexport.lowering.step_inputs import drop_unused_step_inputs
from specexport.onnx_emit import Emitter
from specexport_runtime.abi import KV_LENS, OP_DOMAIN, OP_NAME, PAD_INDEX, ROW_ENDS, ROW_STARTS, UNPAD_INDEX
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

_K, _K_CACHE, _V_CACHE = 1, 3, 4  # inputs of the node
_STEP = (KV_LENS, ROW_STARTS, ROW_ENDS, PAD_INDEX, UNPAD_INDEX)

# An idle row, whose cache may be empty, names a token of another row: it is shown one entry, whatever that holds.
# Widths are numbers: ONNX Runtime takes sizes of one name for equal in the whole graph, and layers differ.
_FUNCTION = """{name}<scale, window, softcap>(
    q, k_cache, v_cache, kv_lens, row_starts, row_ends, pad_index, unpad_index) => (output) {{
  front = Constant<value_ints = [0]>()
  token_axis = Constant<value_ints = [1]>()
  zero = Constant<value_int = 0>()
  one = Constant<value_int = 1>()
  one32 = Cast<to = 6>(one)
  tokens_q = Unsqueeze(q, front)
  none_dims = Constant<value_ints = [1, 0, {kv_width}]>()
  none = ConstantOfShape(none_dims)
  counts = Sub(row_ends, row_starts)
  counts32 = Cast<to = 6>(counts)
  row_totals = Max(kv_lens, counts32)
  row_lasts = Sub(row_totals, one32)
  width = Shape<start = 2, end = 3>(pad_index)
  width0 = Squeeze(width)
  tile_slots = Range(zero, width0, one)
  last_slots = Sub(counts, one)
  row_slots = Min(tile_slots, last_slots)
  rows = Scan<num_scan_inputs = 7, body = row (
      int64[1] row_start, int64[1] row_end, int64[Q] row_slot, float[1, {kv_heads}, L, {dim}] row_k_cache,
      float[1, {kv_heads}, L, {dim}] row_v_cache, int32[1] row_last, int32[1] row_total
  ) => (float[1, Q, {width}] row_out) {{
    row_q = Slice(tokens_q, row_start, row_end, token_axis)
    attended = com.microsoft.GroupQueryAttention<
        num_heads = {heads}, kv_num_heads = {kv_heads}, scale: float = @scale, local_window_size: int = @window,
        softcap: float = @softcap
    >(row_q, none, none, row_k_cache, row_v_cache, row_last, row_total)
    row_out = Gather<axis = 1>(attended, row_slot)
  }}>(row_starts, row_ends, row_slots, k_cache, v_cache, row_lasts, row_totals)
  out_dims = Constant<value_ints = [-1, {width}]>()
  tile = Reshape(rows, out_dims)
  output = Gather<axis = 0>(tile, unpad_index)
}}"""


def appends(node: "ir.Node") -> bool:
    """Whether an ``UnpaddedAttention`` node puts keys and values of its own into its caches."""
    return node.inputs[_K] is not None


def lower_shared_kv(ir_model: "ir.Model", nodes: "list[ir.Node]") -> None:
    """Attach the body to attention nodes that append nothing, in place.

    Args:
        ir_model: the traced model.
        nodes: all its attention nodes.

    Raises:
        CheckFailedError: some of them append.
        UnsupportedModelError: the fused kernel does not take their heads.
    """
    import onnx_ir as ir

    if any(map(appends, nodes)):
        raise CheckFailedError("a graph has caches of its own, or those of another model: not both.")
    by_name = {str(value.name): value for value in ir_model.graph.inputs}
    step = [by_name[spec.name] for spec in _STEP]
    for node in nodes:
        refuse_slopes(node, "attention over another model's caches")
        k_dim, v_dim = (_head_dim(node, index) for index in (_K_CACHE, _V_CACHE))
        if not fused_takes(k_dim, v_dim):
            raise UnsupportedModelError(
                f"{node.name}: it reads caches of another model in heads of {k_dim} and {v_dim} values, and `ort-cpu` "
                "does so for one size, a multiple of 8.",
                "draft with a model or with `lookup` instead.",
            )
        heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": k_dim}
        name = f"{OP_NAME}SharedKv{heads}x{kv_heads}x{k_dim}"
        text = _FUNCTION.format(name=name, width=heads * k_dim, kv_width=kv_heads * k_dim, **sizes)
        function = parse_function(text, ir_model.opset_imports[""])
        ir_model.functions.setdefault(function.identifier(), function)
        attributes = {name: node.attributes[name] for name in ("scale", "window", "softcap")}
        given = [node.inputs[index] for index in (0, _K_CACHE, _V_CACHE)]
        emit = Emitter(ir_model.graph)
        made = emit.node(function.name, [*given, *step], attributes, domain=OP_DOMAIN, name=node.name)
        old, new = node.outputs[0], made.outputs[0]
        new.type, new.shape = old.type, old.shape
        emit.place(before=node)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        ir_model.graph.remove(node, safe=True)
        new.name = old.name
    ir_model.opset_imports.setdefault("com.microsoft", 1)
    drop_unused_step_inputs(ir_model)


def _head_dim(node: "ir.Node", index: int) -> int:
    shape = None if node.inputs[index] is None else node.inputs[index].shape  # type: ignore[union-attr]
    size = None if shape is None else shape[4]
    if not isinstance(size, int):
        raise CheckFailedError(f"{node.name}: the caches have no static head size.")
    return size
