"""Norms whose weights are kept in float32 beside half-precision activations."""

from typing import TYPE_CHECKING

from specexport.onnx_emit import Emitter

if TYPE_CHECKING:
    import onnx_ir as ir


def unify_norm_types(ir_model: "ir.Model") -> int:
    """Cast the input of every RMSNormalization to the dtype of its scale, in place; returns how many there were.

    Some models (Gemma, OLMo 2) multiply by a float32 weight before they go back to half precision. The operator allows
    that, with the output in the scale's dtype, but onnx infers the input's dtype for it, and ONNX Runtime 1.31 has no
    kernel for a bfloat16 input with a float32 scale: it expands the node into one that is no valid graph. The cast is
    exact, and what the model itself does.
    """
    mixed = [
        node
        for node in ir_model.graph
        if node.op_type == "RMSNormalization" and len({value.dtype for value in node.inputs if value is not None}) > 1
    ]
    for node in mixed:
        given, scale = node.inputs[0], node.inputs[1]
        if given is None or scale is None or scale.dtype is None:
            continue
        emit = Emitter(ir_model.graph)
        exact = emit.cast(given, scale.dtype)
        exact.shape = given.shape
        emit.place(before=node)
        node.replace_input_with(0, exact)
    return len(mixed)
