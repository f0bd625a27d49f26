"""Fold what depends on constants only."""

import onnx_ir as ir

from specexport.passes.base import CountingPass

_LARGEST_INPUT = 8192
_LARGEST_OUTPUT = 65536


class ConstantFoldPass(CountingPass):
    """Replace small constant subgraphs by their values.

    Shapes, index vectors and scalars; never a weight: a folded copy of a large tensor would be held in memory beside
    the original until the engine is written. Counts the nodes that went away.
    """

    name = "constant-fold"
    reason = "shape arithmetic of the trace is fixed by now and need not run every step"

    def rewrite(self, model: ir.Model) -> int:
        """Fold, then drop what nobody reads any more."""
        from onnxscript import optimizer

        before = len(model.graph)
        optimizer.fold_constants(model, input_size_limit=_LARGEST_INPUT, output_size_limit=_LARGEST_OUTPUT)
        optimizer.remove_unused_nodes(model)
        return before - len(model.graph)
