"""Attention for TensorRT: its own operators, tokens folded into heads or not, or the unpadded-KV plugin."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.passes.residual_blocks import ResidualBlock

TENSORRT_LOWERINGS = ("native-folded", "native", "plugin")


def lower_tensorrt(
    ir_model: "ir.Model",
    *,
    lowering: str,
    kv_capacity: int | None,
    fold: int = 1,
    skipped: "Seq[ResidualBlock]" = (),
) -> tuple[str, ...]:
    """Give every ``UnpaddedAttention`` node its body, in place; unused step inputs leave the graph.

    Args:
        ir_model: the traced model.
        lowering: one of :data:`TENSORRT_LOWERINGS`.
        kv_capacity: L, the entries of a cache row, which is fixed in the engine.
        fold: tokens of a row that lowering ``native-folded`` takes for heads: those of a verify step. The engine's
            profiles must have the same ``fold``.
        skipped: blocks that draft steps leave out; not for lowering ``plugin``.

    Returns:
        Name of the form that each attention layer took, in order.

    Raises:
        RecipeError: there is no such lowering, it cannot leave out layers, or the capacity is missing.
        UnsupportedModelError: TensorRT cannot compute a layer exactly.
    """
    if lowering not in TENSORRT_LOWERINGS:
        known = ", ".join(TENSORRT_LOWERINGS)
        raise RecipeError(f"TensorRT has no lowering {lowering!r}.", f"use one of: {known}.")
    if kv_capacity is None or kv_capacity < 1:
        raise RecipeError(f"TensorRT needs the KV capacity at build time, not {kv_capacity}.")
    from specexport.lowering.norms import unify_norm_types

    unify_norm_types(ir_model)  # TensorRT rounds a norm's float32 weight to the dtype of its input, and says nothing
    if lowering == "plugin":
        if skipped:
            raise RecipeError("lowering 'plugin' cannot leave out layers.", "use lowering 'native-folded'.")
        from specexport.lowering.trt_plugin import lower_trt_plugin

        return lower_trt_plugin(ir_model, kv_capacity=kv_capacity)
    from specexport.lowering.trt_native import lower_trt_native

    folded = fold if lowering == "native-folded" else 1
    return lower_trt_native(ir_model, kv_capacity=kv_capacity, fold=folded, skipped=skipped)
