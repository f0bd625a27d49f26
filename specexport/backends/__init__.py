"""Backends: a lowered graph to engine files."""

from pathlib import Path
from typing import TYPE_CHECKING

from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["build_engine"]


def build_engine(ir_model: "ir.Model", backend: str, folder: Path) -> str:
    """Write the engine files of a lowered model into ``folder`` (which is made).

    Returns:
        name of the engine file inside ``folder``.

    Raises:
        RecipeError: there is no backend of that name.
    """
    if backend != "ort-cpu":
        raise RecipeError(f"there is no backend {backend!r}.", "use backend ort-cpu.")
    from specexport.backends.ort import write_onnx

    return write_onnx(ir_model, folder)
