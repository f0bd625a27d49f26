"""Compute equal things once."""

import onnx_ir as ir

from specexport.passes.base import CountingPass


class NodeDeduplicatePass(CountingPass):
    """Merge nodes with equal operator, inputs and attributes. Counts the nodes that went away."""

    name = "node-deduplicate"
    reason = "the trace computes the rotary tables (cosine, sine) again in every layer"

    def rewrite(self, model: ir.Model) -> int:
        """Merge equal nodes."""
        import onnx_ir.passes.common as common_passes

        before = len(model.graph)
        common_passes.CommonSubexpressionEliminationPass()(model)
        return before - len(model.graph)
