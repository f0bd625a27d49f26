"""Lowering of ``specexport::Experts`` for ONNX Runtime on the CPU: those that no pass has taken."""

from typing import TYPE_CHECKING

from specexport.passes.block_experts import put_float_experts

if TYPE_CHECKING:
    import onnx_ir as ir


def lower_experts(ir_model: "ir.Model") -> int:
    """Put ``BlockExperts`` in the place of each layer's experts, in place; returns how many there were.

    Raises:
        CheckFailedError: the weights are not constant, or a size is not static.
    """
    return put_float_experts(ir_model)
