"""Attention for TensorRT: its own operators, tokens folded into heads or not, or the unpadded-KV plugin."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.passes.residual_blocks import ResidualBlock

TENSORRT_LOWERINGS = ("native-folded", "native", "plugin")


def lower_tensorrt(
    ir_model: "ir.Model",
    *,
    lowering: str,  # one of TENSORRT_LOWERINGS
    kv_capacity: int | None,  # L, the entries of a cache row, which is fixed in the engine
    fold: int = 1,  # tokens of a verify step's row, taken for heads by ``native-folded``; as in the profiles
    skipped: "Sequence[ResidualBlock]" = (),  # blocks that draft steps leave out; not for lowering ``plugin``
) -> tuple[str, ...]:
    """Give every ``UnpaddedAttention`` node its body, in place; returns the form that each layer took, in order."""
    if lowering not in TENSORRT_LOWERINGS:
        known = ", ".join(TENSORRT_LOWERINGS)
        raise RecipeError(f"TensorRT has no lowering {lowering!r}.", f"use one of: {known}.")
    if kv_capacity is None or kv_capacity < 1:
        raise RecipeError(f"TensorRT needs the KV capacity at build time, not {kv_capacity}.")
    from specexport.lowering.common import unify_norm_types

    unify_norm_types(ir_model)  # TensorRT rounds a norm's float32 weight to the dtype of its input, and says nothing
    if lowering == "plugin":
        if skipped:
            raise RecipeError("lowering 'plugin' cannot leave out layers.", "use lowering 'native-folded'.")
        from specexport.lowering.trt_plugin import lower_trt_plugin

        return lower_trt_plugin(ir_model, kv_capacity=kv_capacity)
    from specexport.lowering.trt_native import lower_trt_native

    folded = fold if lowering == "native-folded" else 1
    return lower_trt_native(ir_model, kv_capacity=kv_capacity, fold=folded, skipped=skipped)
