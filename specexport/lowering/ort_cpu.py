"""Lowering for ONNX Runtime on the CPU: attention is one node a layer, our own operator (``runtime/operators``).

It takes what the contract's operator takes, less what step inputs say twice, and what fusions put into the node: rotary
tables, scales of int8 caches, and q, k and v as one tensor.

ONNX Runtime 1.31 computes some operators several values at a time, and the last ones of a tensor otherwise: a token's
bits would depend on the step. These are made to go value by value.

Caches may be int8, with a fixed scale for each channel of each layer. All entries are read as they are stored, those of
the step's own tokens too: a token's result does not depend on its step.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.channel_ranges import CacheRange, FloatVector
from specexport.lowering.common import drop_unused_step_inputs, is_causal
from specexport.lowering.fuse import ROTARY_INPUTS, find_packed_qkv, has_appended_kv, remove_dead_nodes, rotary_kind
from specexport.lowering.recurrence import lower_recurrences
from specexport.onnx_emit import Emitter, add_input, constant, set_inputs
from specexport.ops.spec import DIM_NAMES, UNPADDED_ATTENTION
from specexport.passes.base import CountingPass, Rewrite, attention_nodes
from specexport.passes.block_experts import replace_float_experts
from specexport_runtime.abi import KV_POSITIONS, OP_DOMAIN, OP_NAME, PARENTS, POSITIONS, STATE_STEPS
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

_FUSED = ("cos_table", "sin_table", "k_scale", "v_scale")
INPUTS = (
    *("q", "k", "v", "k_cache", "v_cache", "kv_lens", "cu_new_tokens", "sinks", "slopes"),
    *(*_FUSED, "positions", "kv_positions", "parents"),
)
"""Inputs of our operator by name, in order; ``positions`` and ``kv_positions`` are those of padded-KV graphs, and
``parents`` is of graphs that take trees."""

_CONTRIB = "com.microsoft"
_WHOLE_ONLY = {"Sin", "Cos", "Log"}
_AT_ONCE = 16
"""More than any kernel takes at once: 64 bytes."""

_CACHES = (3, 4)
_FIRST_SCALE = ROTARY_INPUTS[-1] + 1  # of a node's inputs: scales of keys and of values, float32 [H * D] each
_LARGEST = 127


def operator_passes(*, padded_kv: bool = False, trees: bool = False) -> list[CountingPass]:
    """The passes after which a session can run a graph.

    ``padded_kv`` makes the padded-KV graph, with the step input ``kv_positions``; CheckFailedError for attention that
    is not causal. ``trees`` adds the step input ``parents``, unless states, a whole row, or another model's cache is
    read: these know chains alone.
    """
    attention = partial(_lower_attention, padded_kv=padded_kv, trees=trees)
    return [
        Rewrite("recurrence-lower", "recurrences become functions over the session's kernels", lower_recurrences),
        Rewrite("float-experts", "experts that no pass has taken: no session has our operator", replace_float_experts),
        Rewrite("value-by-value", "a token's bits must not depend on the step it is in", make_value_by_value),
        Rewrite("attention-lower", "our operator reads caches in place; unread step inputs go", attention),
    ]


def int8_cache_pass(ranges: Sequence[CacheRange]) -> CountingPass:
    """:func:`use_int8_caches` as a pass: before attention is lowered, which takes the scales over."""
    return Rewrite("int8-caches", "caches take a quarter of the memory", partial(use_int8_caches, ranges=ranges))


def _lower_attention(ir_model: "ir.Model", *, padded_kv: bool, trees: bool) -> int:
    import onnx_ir as ir

    graph = ir_model.graph
    nodes = list(attention_nodes(ir_model))
    told: dict[str, ir.Value | None] = {}
    if nodes and padded_kv:
        shape = [DIM_NAMES.get(word, word) if isinstance(word, str) else word for word in KV_POSITIONS.shape]
        add_input(graph, KV_POSITIONS.name, ir.DataType.INT64, shape)
        told = {value.name: value for value in graph.inputs if value.name in (POSITIONS.name, KV_POSITIONS.name)}
    has_states = any(value.name == STATE_STEPS.name for value in graph.inputs)
    if trees and nodes and not has_states and all(is_causal(node) and has_appended_kv(node) for node in nodes):
        told[PARENTS.name] = add_input(graph, PARENTS.name, ir.DataType.INT64, [DIM_NAMES["T"]])
    for node in nodes:
        if padded_kv and not is_causal(node):
            raise CheckFailedError(f"{node.name}: a padded-KV graph has causal attention only.")
        _replace_attention(ir_model, node, told)
    remove_dead_nodes(ir_model)  # what a packed tensor was split by
    drop_unused_step_inputs(ir_model)
    return len(nodes)


def _replace_attention(ir_model: "ir.Model", node: "ir.Node", told: "dict[str, ir.Value | None]") -> None:
    names = [*(item.name for item in UNPADDED_ATTENTION.inputs), *_FUSED]
    given = dict(zip(names, node.inputs, strict=False)) | told
    packed = find_packed_qkv(node.inputs[:3])
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
    emit, appended = Emitter(ir_model.graph), has_appended_kv(node)
    made = emit.node(OP_NAME, inputs, attributes, outputs=len(node.outputs), domain=OP_DOMAIN, name=node.name)
    emit.replace(node, made.outputs)
    if not appended:
        made.resize_outputs(1)


def make_value_by_value(ir_model: "ir.Model") -> int:
    """Let each value of such operators have the same bits wherever it is, in place; returns how many were changed."""
    import onnx_ir as ir

    changed = 0
    for node in [node for node in ir_model.graph if node.domain == ""]:
        if node.op_type == "Softplus" and node.outputs[0].dtype in (None, ir.DataType.FLOAT):
            _replace_softplus(ir_model, node)
        elif node.op_type not in _WHOLE_ONLY or not _pad_last_axis(ir_model, node):
            continue
        changed += 1
    return changed


def _replace_softplus(ir_model: "ir.Model", node: "ir.Node") -> None:
    """Softplus by a kernel that goes value by value."""
    value = node.inputs[0]
    emit = Emitter(ir_model.graph, f"{node.name}.softplus")
    flat = emit.op("Reshape", value, emit.const([1, -1, 1]))
    inputs = [flat, emit.const([0.0], "float32"), emit.const([1.0], "float32")]
    gate = emit.op("LinearAttentionGate", *inputs, domain=_CONTRIB)
    emit.replace(node, [emit.op("Reshape", gate, emit.op("Shape", value), shape=node.outputs[0].shape)])
    ir_model.opset_imports.setdefault(_CONTRIB, 1)


def _pad_last_axis(ir_model: "ir.Model", node: "ir.Node") -> bool:
    """Fill the last axis up, so that a tensor has no last values."""
    value = node.inputs[0]
    shape = None if value is None else value.shape
    width = shape[-1] if shape else None
    if shape is None or not isinstance(width, int) or width % _AT_ONCE == 0:
        return False
    import onnx_ir as ir

    emit = Emitter(ir_model.graph, f"{node.name}.whole")
    rank = len(shape)
    # No initializers: graphs of one model share one file of them, and not all need these.
    pads, start, end, axis = (
        emit.op("Constant", dtype=ir.DataType.INT64, value_ints=values)
        for values in ([0] * (2 * rank - 1) + [-width % _AT_ONCE], [0], [width], [rank - 1])
    )
    found = emit.op(node.op_type, emit.op("Pad", value, pads))
    emit.replace(node, [emit.op("Slice", found, start, end, axis, shape=node.outputs[0].shape)])
    return True


def use_int8_caches(ir_model: "ir.Model", ranges: Sequence[CacheRange]) -> int:
    """Let attention keep its caches in int8, in place, after all passes and fusions; ``ranges`` has one a layer."""
    import onnx_ir as ir

    nodes = list(attention_nodes(ir_model))
    for layer, (node, found) in enumerate(zip(nodes, ranges, strict=True)):
        scales = [
            constant(ir_model.graph, f"{name}_cache_scale.{layer}", _scales(largest))
            for name, largest in zip("kv", found, strict=True)
        ]
        set_inputs(node, _FIRST_SCALE, scales)
        for cache in (*(node.inputs[index] for index in _CACHES), *node.outputs[1:]):
            cache.type = ir.TensorType(ir.DataType.INT8)  # type: ignore[union-attr]
    return len(nodes)


def _scales(largest: FloatVector) -> FloatVector:
    """A channel that was quiet on all texts gets a hundredth of its layer's largest, so that nothing divides by 0."""
    least = max(float(largest.max()) / 100, float(np.finfo(np.float32).tiny) * _LARGEST)
    found: FloatVector = (np.maximum(largest, least) / _LARGEST).astype(np.float32)
    return found
