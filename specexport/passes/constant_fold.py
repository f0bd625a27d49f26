"""Fold what depends on constants only, and drop what does nothing."""

import onnx_ir as ir

from specexport.passes.base import CountingPass, constant_of

_LARGE = 1024  # elements


class ConstantFoldPass(CountingPass):
    """Replace small constant subgraphs by their values, inline the exporter's helper functions, drop no-ops.

    Shapes, index vectors, scalars and tables; never a weight matrix: a folded copy would be held in memory beside the
    original until the engine is written (``TransposeFoldPass`` does that lazily). Counts the nodes that went away.
    """

    name = "constant-fold"
    reason = "the shape arithmetic of the trace is known by now and need not run on every step"

    def rewrite(self, model: ir.Model) -> int:
        """Fold until nothing changes."""
        from onnxscript import optimizer

        before = len(model.graph)
        optimizer.optimize_ir(model, input_size_limit=_LARGE, should_fold=_should_fold)
        return max(0, before - len(model.graph))


def _should_fold(node: ir.Node) -> bool | None:
    """False for a node that reads a large constant, None to leave the decision to the folder."""
    tensors = (constant_of(value) for value in node.inputs)
    return False if any(tensor is not None and tensor.size > _LARGE for tensor in tensors) else None
