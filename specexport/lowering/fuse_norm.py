"""Residual additions into the norms behind them."""

from typing import TYPE_CHECKING

from specexport.onnx_emit import Emitter

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}
"""Norms by the operator of ``com.microsoft`` that adds first."""


def fuse_norms(ir_model: "ir.Model") -> int:
    """Join each residual addition of a lowered model with the norm behind it, in place; returns how many were joined.

    ``Add`` and ``RMSNormalization`` (or ``LayerNormalization``) over the last axis become one
    ``com.microsoft.Skip(Simplified)LayerNormalization``, which gives the sum as well.
    """
    joined = 0
    for node in [n for n in ir_model.graph if n.op_type in NORMS and n.domain == ""]:
        value = node.inputs[0]
        add = None if value is None else value.producer()
        if add is not None and _joins(add, node):
            _join_norm(ir_model, add, node)
            joined += 1
    return joined


def _joins(add: "ir.Node", norm: "ir.Node") -> bool:
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
    return whole and only_result and norm.attributes.get_int("axis", -1) in (-1, 2) and _plain(norm)


def _plain(norm: "ir.Node") -> bool:
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
