"""Operators that ONNX Runtime's CPU kernels compute several values at a time, and the last ones of a tensor otherwise.

A token's bits would depend on how many tokens a step has, wherever its values are no multiple of what a kernel takes at
once: rotary angles of 10 or of 2 frequencies, and softplus of any number of heads. Measured with ONNX Runtime 1.31.
"""

from typing import TYPE_CHECKING

from specexport.onnx_emit import Emitter

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
_WHOLE_ONLY = {"Sin", "Cos", "Log"}
_AT_ONCE = 16
"""More than any kernel takes at once: 64 bytes."""


def make_value_by_value(ir_model: "ir.Model") -> int:
    """Let each value of such operators have the same bits wherever it is, in place; returns how many were changed."""
    import onnx_ir as ir

    changed = 0
    for node in [node for node in ir_model.graph if node.domain == ""]:
        if node.op_type == "Softplus" and node.outputs[0].dtype in (None, ir.DataType.FLOAT):
            _gate(ir_model, node)
        elif node.op_type not in _WHOLE_ONLY or not _widen(ir_model, node):
            continue
        changed += 1
    return changed


def _gate(ir_model: "ir.Model", node: "ir.Node") -> None:
    """Softplus by a kernel that goes value by value."""
    value = node.inputs[0]
    emit = Emitter(ir_model.graph, f"{node.name}.softplus")
    flat = emit.op("Reshape", value, emit.const([1, -1, 1]))
    inputs = [flat, emit.const([0.0], "float32"), emit.const([1.0], "float32")]
    gate = emit.op("LinearAttentionGate", *inputs, domain=_CONTRIB)
    emit.replace(node, [emit.op("Reshape", gate, emit.op("Shape", value), shape=node.outputs[0].shape)])
    ir_model.opset_imports.setdefault(_CONTRIB, 1)


def _widen(ir_model: "ir.Model", node: "ir.Node") -> bool:
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
