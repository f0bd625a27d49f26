"""Attention for TensorRT: its own operators, or the unpadded-KV plugin."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def lower_tensorrt(
    ir_model: "ir.Model",
    *,
    kv_capacity: int,  # L, the entries of a cache row, which is fixed in the engine
    fold: int = 1,  # tokens of a verify step's row that are taken for heads; as in the profiles; not for the plugin
    plugin: bool = False,
) -> tuple[str, ...]:
    """Give every ``UnpaddedAttention`` node its body, in place; returns the form that each layer took, in order."""
    from specexport.lowering.common import unify_norm_types

    unify_norm_types(ir_model)  # TensorRT rounds a norm's float32 weight to the dtype of its input, and says nothing
    if plugin:
        from specexport.lowering.trt_plugin import lower_trt_plugin

        return lower_trt_plugin(ir_model, kv_capacity=kv_capacity)
    from specexport.lowering.trt_native import lower_trt_native

    return lower_trt_native(ir_model, kv_capacity=kv_capacity, fold=fold)
