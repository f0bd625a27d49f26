"""Float linear layers and embeddings as operators of our own for CPUs."""

import onnx_ir as ir

from specexport.passes.base import CountingPass, constant_of
from specexport.passes.block_experts import put_float_experts
from specexport.passes.block_linear import of_floats, put_linear, put_lookup
from specexport.passes.quantize_blocks import is_lookup
from specexport.passes.quantize_sites import linear_site


class FloatBlocksPass(CountingPass):
    """Multiply by float weights in the narrowest type that holds them exactly, and look tokens up in such.

    Most checkpoints are bfloat16: a step then reads half of what float32 is, and computes the same. Activations and
    sums are float32. Counts layers, lookups, and layers of experts.
    """

    name = "float-blocks"
    reason = "decoding reads every weight for every token, and no token's sum may depend on the others of its step"

    def rewrite(self, model: ir.Model) -> int:
        """Replace every product with a constant matrix, every lookup of the step's tokens, and experts."""
        graph, changes = model.graph, put_float_experts(model)
        for node in list(graph):
            site = linear_site(node)
            if site is not None:
                put_linear(graph, site, of_floats(site.tensor, turned=site.turned))
                changes += 1
            elif is_lookup(node):
                put_lookup(graph, node, of_floats(constant_of(node.inputs[0]), turned=True))  # type: ignore[arg-type]
                changes += 1
        return changes
