"""Lowering for ONNX Runtime on the CPU: attention is one node a layer, our own operator (``runtime/operators``).

It takes what the contract's operator takes, less the step inputs that say the same thing twice, and what fusions have
put into the node: rotary tables, scales of int8 caches, and q, k and v as one tensor.
"""

from typing import TYPE_CHECKING, Any

from specexport.lowering.causal import is_causal
from specexport.lowering.fuse import appends, packed_qkv, remove_dead_nodes, rotary_kind
from specexport.lowering.recurrence import lower_recurrences
from specexport.lowering.step_inputs import drop_unused_step_inputs
from specexport.lowering.value_by_value import make_value_by_value
from specexport.onnx_emit import Emitter, add_input
from specexport.ops.spec import DIM_NAMES, UNPADDED_ATTENTION
from specexport.passes.block_experts import put_float_experts
from specexport_runtime.abi import KV_POSITIONS, OP_DOMAIN, OP_NAME, POSITIONS
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

_FUSED = ("cos_table", "sin_table", "k_scale", "v_scale")
INPUTS = (
    *("q", "k", "v", "k_cache", "v_cache", "kv_lens", "cu_new_tokens", "sinks", "slopes"),
    *(*_FUSED, "positions", "kv_positions"),
)
"""Inputs of our operator by name, in order; ``positions`` and ``kv_positions`` are those of padded-KV graphs."""


def lower_ort_cpu(ir_model: "ir.Model", *, padded_kv: bool = False) -> None:
    """Put our operator in the place of each attention, and drop the step inputs that are not read, in place.

    ``padded_kv`` makes the padded-KV graph, with the step input ``kv_positions``; CheckFailedError for attention that
    is not causal.
    """
    import onnx_ir as ir

    lower_recurrences(ir_model)
    put_float_experts(ir_model)  # the layers that no pass has taken
    make_value_by_value(ir_model)
    graph = ir_model.graph
    nodes = [node for node in graph if node.op_type == OP_NAME and node.domain == OP_DOMAIN]
    told: dict[str, ir.Value | None] = {}
    if nodes and padded_kv:
        shape = [DIM_NAMES.get(word, word) if isinstance(word, str) else word for word in KV_POSITIONS.shape]
        add_input(graph, KV_POSITIONS.name, ir.DataType.INT64, shape)
        told = {value.name: value for value in graph.inputs if value.name in (POSITIONS.name, KV_POSITIONS.name)}
    for node in nodes:
        if padded_kv and not is_causal(node):
            raise CheckFailedError(f"{node.name}: a padded-KV graph has causal attention only.")
        _replace(ir_model, node, told)
    remove_dead_nodes(ir_model)  # what a packed tensor was split by
    drop_unused_step_inputs(ir_model)


def _replace(ir_model: "ir.Model", node: "ir.Node", told: "dict[str, ir.Value | None]") -> None:
    names = [*(item.name for item in UNPADDED_ATTENTION.inputs), *_FUSED]
    given = dict(zip(names, node.inputs, strict=False)) | told
    packed = packed_qkv(node)
    if packed is not None:
        given |= {"q": packed, "k": None, "v": None}
    attributes: dict[str, Any] = {
        item.name: node.attributes.get(item.name, item.default)  # those without a default are always there
        for item in UNPADDED_ATTENTION.attributes
    }
    attributes |= {"packed": int(packed is not None), "rotary": rotary_kind(node)}
    inputs = [given.get(name) for name in INPUTS]
    while inputs[-1] is None:
        inputs.pop()
    emit, appended = Emitter(ir_model.graph), appends(node)
    made = emit.node(OP_NAME, inputs, attributes, outputs=len(node.outputs), domain=OP_DOMAIN, name=node.name)
    emit.replace(node, made.outputs)
    if not appended:
        made.resize_outputs(1)
