"""Drop nodes and weights without readers."""

import onnx_ir as ir

from specexport.passes.base import CountingPass


class WeightRemovePass(CountingPass):
    """Remove nodes whose results are not read, then the weights that only they read. Counts weights."""

    name = "weight-remove"
    reason = "a weight without readers would be written, mapped and hashed for nothing"

    def rewrite(self, model: ir.Model) -> int:
        """Remove unused nodes and initializers; graph inputs and outputs stay."""
        from onnxscript import optimizer

        before = len(model.graph.initializers)
        inputs = list(model.graph.inputs)
        optimizer.remove_unused_nodes(model)
        unused = [name for name, value in model.graph.initializers.items() if not value.uses() and value not in inputs]
        for name in unused:
            del model.graph.initializers[name]
        return before - len(model.graph.initializers)
