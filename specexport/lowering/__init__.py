"""Lowering: which body stands behind ``specexport::UnpaddedAttention`` on a backend."""

from typing import TYPE_CHECKING

from specexport.recipe import LOWERINGS, TENSORRT_BACKENDS
from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["TENSORRT_LOWERINGS", "lower_model"]

TENSORRT_LOWERINGS = tuple(dict.fromkeys(name for names in LOWERINGS.values() for name in names))
"""Lowerings of the TensorRT backends: TensorRT's own attention, in two forms, or the unpadded-KV plugin."""


def lower_model(
    ir_model: "ir.Model",
    backend: str,
    *,
    padded_kv: bool = False,
    lowering: str | None = None,
    kv_capacity: int | None = None,
) -> tuple[str, ...]:
    """Give every ``UnpaddedAttention`` node its body for ``backend``, in place; unused step inputs leave the graph.

    Args:
        ir_model: the traced model.
        backend: backend name.
        padded_kv: make the graph for caches that hold padding entries: it has the step input ``kv_positions``, and
            what a token sees is decided by positions (ort-cpu only).
        lowering: for a TensorRT backend, one of ``TENSORRT_LOWERINGS``; the other backends have one lowering each.
        kv_capacity: for a TensorRT backend: L, the entries of a cache row, which is fixed in the engine.

    Returns:
        Name of the form that each attention layer took, in order; empty where a lowering has one form only.

    Raises:
        RecipeError: there is no such lowering for ``backend``, or an argument that it needs is missing.
        UnsupportedModelError: the backend cannot compute a layer exactly.
    """
    if padded_kv and backend != "ort-cpu":
        raise RecipeError(f"backend {backend} has no padded-KV graph.", "compare with padded KV on backend ort-cpu.")
    if backend == "ort-cpu":
        from specexport.lowering.ort_cpu import lower_ort_cpu

        lower_ort_cpu(ir_model, padded_kv=padded_kv)
        return ()
    if backend == "ort-cuda":
        from specexport.lowering.ort_cuda import lower_ort_cuda

        lower_ort_cuda(ir_model)
        return ()
    if backend in TENSORRT_BACKENDS:
        return _lower_tensorrt(ir_model, backend, lowering, kv_capacity)
    known = ", ".join(("ort-cpu", "ort-cuda", *TENSORRT_BACKENDS))
    raise RecipeError(f"there is no lowering for backend {backend!r}.", f"use one of: {known}.")


def _lower_tensorrt(
    ir_model: "ir.Model", backend: str, lowering: str | None, kv_capacity: int | None
) -> tuple[str, ...]:
    if lowering not in TENSORRT_LOWERINGS:
        known = ", ".join(TENSORRT_LOWERINGS)
        raise RecipeError(f"backend {backend} has no lowering {lowering!r}.", f"use one of: {known}.")
    if kv_capacity is None or kv_capacity < 1:
        raise RecipeError(f"backend {backend} needs the KV capacity at build time, not {kv_capacity}.")
    from specexport.lowering.norms import unify_norm_types

    unify_norm_types(ir_model)  # TensorRT rounds a norm's float32 weight to the dtype of its input, and says nothing
    if lowering == "plugin":
        from specexport.lowering.trt_plugin import lower_trt_plugin

        return lower_trt_plugin(ir_model, kv_capacity=kv_capacity)
    from specexport.lowering.trt_native import lower_trt_native

    return lower_trt_native(ir_model, kv_capacity=kv_capacity, grouped=lowering == "native-grouped")
