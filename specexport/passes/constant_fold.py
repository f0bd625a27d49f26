"""Fold what depends on constants only, and drop what does nothing."""

import onnx_ir as ir

from specexport.passes.base import CountingPass, constant_of

_LARGE = 1024  # elements
_MAX_ROUNDS = 6  # a simplified reshape can make another shape constant

# Rules of onnxscript, by name. Those with several outputs are left out: matching them is quadratic in the graph.
_RULES = (
    "add_0_rule",
    "sub_0_rule",
    "mul_by_1_rule",
    "div_by_1_rule",
    "cast_cast_rule",
    "no_op_cast_rule",
    "no_op_expand_rule",
    "no_op_transpose_rule",
    "transpose_transpose_rule",
    "unsqueeze_unsqueeze_rule",
    "squeeze_reshape_1d_rule",
    "reshape_reshape_rule",
    "materialize_reshape_shape_rule",
    "collapse_slice_rule",
    "collapse_slice2_rule",
    "cast_constant_of_shape_rule",
    "no_op_dynamic_scatter_nd_rule",
    "no_op_static_scatter_nd_rule",
)


class ConstantFoldPass(CountingPass):
    """Replace small constant subgraphs by their values, inline the exporter's helper functions, drop no-ops.

    Shapes, index vectors, scalars and tables; never a weight matrix: a folded copy would be held in memory beside the
    original until the engine is written (``TransposeFoldPass`` does that lazily). Counts the nodes that went away.
    """

    name = "constant-fold"
    reason = "the shape arithmetic of the trace is known by now and need not run on every step"

    def rewrite(self, model: ir.Model) -> int:
        """Inline, fold and simplify, then keep every constant as an initializer."""
        import onnx_ir.passes.common as common_passes
        from onnxscript import optimizer
        from onnxscript.rewriter import RewritePass
        from onnxscript.rewriter.rules import common as rules

        common_passes.InlinePass()(model)
        before = len(model.graph)
        simplify = RewritePass([getattr(rules, name) for name in _RULES])
        for _ in range(_MAX_ROUNDS):
            nodes = len(model.graph)
            optimizer.fold_constants(
                model, onnx_shape_inference=True, input_size_limit=_LARGE, should_fold=_should_fold
            )
            simplify(model)
            common_passes.RemoveUnusedNodesPass()(model)
            if len(model.graph) == nodes:
                break
        tidy: list[ir.passes.PassBase] = [
            common_passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common_passes.RemoveUnusedOpsetsPass(),
            common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common_passes.CommonSubexpressionEliminationPass(),
            common_passes.NameFixPass(),
        ]
        for step in tidy:
            step(model)
        return max(0, before - len(model.graph))


def _should_fold(node: ir.Node) -> bool | None:
    """False for a node that reads a large constant or casts a matrix, None to leave the decision to the folder.

    A matrix that a model multiplies in float32 on purpose (a router's) stays stored in the model's dtype, of any size.
    """
    tensors = [tensor for tensor in map(constant_of, node.inputs) if tensor is not None]
    matrix_cast = node.op_type == "Cast" and any(len(tensor.shape) > 1 for tensor in tensors)
    return False if matrix_cast or any(tensor.size > _LARGE for tensor in tensors) else None
