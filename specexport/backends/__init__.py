"""Backends: a lowered graph to engine files."""

from pathlib import Path
from typing import TYPE_CHECKING

from specexport_runtime.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["build_engine", "build_full_engine", "build_padded_engine"]


def build_engine(ir_model: "ir.Model", backend: str, folder: Path) -> str:
    """Write the engine files of a lowered model into ``folder`` (which is made).

    Returns:
        name of the engine file inside ``folder``.

    Raises:
        RecipeError: there is no backend of that name.
    """
    _check_backend(backend)
    from specexport.backends.ort import write_onnx

    return write_onnx(ir_model, folder)


def build_padded_engine(ir_model: "ir.Model", backend: str, folder: Path) -> str:
    """Write the padded-KV graph beside the engine that :func:`build_engine` wrote; it shares the engine's weights file.

    Returns:
        name of the file inside ``folder``.

    Raises:
        RecipeError: there is no backend of that name.
        CheckFailedError: the two graphs have not the same weights.
    """
    _check_backend(backend)
    from specexport.backends.ort import write_padded_onnx

    return write_padded_onnx(ir_model, folder)


def build_full_engine(ir_model: "ir.Model", backend: str, folder: Path) -> str:
    """Write the graph for steps of one token a row, like :func:`build_padded_engine`."""
    _check_backend(backend)
    from specexport.backends.ort import write_full_onnx

    return write_full_onnx(ir_model, folder)


def _check_backend(backend: str) -> None:
    if backend != "ort-cpu":
        raise RecipeError(f"there is no backend {backend!r}.", "use backend ort-cpu.")
