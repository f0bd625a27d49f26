"""Lowering: which body stands behind ``specexport::UnpaddedAttention`` on a backend."""

from typing import TYPE_CHECKING

from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["lower_model"]


def lower_model(ir_model: "ir.Model", backend: str, *, padded_kv: bool = False) -> None:
    """Give every ``UnpaddedAttention`` node its body for ``backend``, in place; unused step inputs leave the graph.

    Args:
        ir_model: the traced model.
        backend: backend name.
        padded_kv: make the graph for caches that hold padding entries: it has the step input ``kv_positions``, and
            what a token sees is decided by positions.

    Raises:
        RecipeError: there is no lowering for ``backend``.
    """
    if backend != "ort-cpu":
        raise RecipeError(f"there is no lowering for backend {backend!r}.", "use backend ort-cpu.")
    from specexport.lowering.ort_cpu import lower_ort_cpu

    lower_ort_cpu(ir_model, padded_kv=padded_kv)
