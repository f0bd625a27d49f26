"""Put norms and rotary embeddings back together."""

import onnx_ir as ir

from specexport.passes.base import CountingPass


class OperatorFusePass(CountingPass):
    """Replace the pieces of a norm or a rotary embedding by opset 23's RMSNormalization and RotaryEmbedding.

    Counts the fused operators.
    """

    name = "operator-fuse"
    reason = "one kernel where the trace has ten: fewer launches and no intermediate tensors"

    def rewrite(self, model: ir.Model) -> int:
        """Fuse wherever the pattern fits exactly."""
        from onnxscript.rewriter import onnx_fusions

        counts: dict[str, int] = onnx_fusions.fuse(model)
        return sum(counts.values())
