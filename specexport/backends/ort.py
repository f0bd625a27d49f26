"""ONNX Runtime engine files: the graph, and its weights in one file laid out for memory mapping."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

ENGINE_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"
PAGE_BYTES = 4096
INLINE_BYTES = 1024
"""Tensors up to this size stay inside the graph file."""


def write_onnx(ir_model: "ir.Model", folder: Path) -> str:
    """Write ``model.onnx`` and ``model.onnx.data`` into ``folder``.

    Weights of a page or more start on a page, so that a session can map them. They are written one at a time, and lazy
    ones are computed then: no second copy of the model is ever held. The same model gives the same bytes.

    Returns:
        the engine file's name.
    """
    import onnx_ir as ir

    folder.mkdir(parents=True, exist_ok=True)
    ir.save(
        ir_model,
        folder / ENGINE_NAME,
        external_data=DATA_NAME,
        size_threshold_bytes=INLINE_BYTES,
        alignment=PAGE_BYTES,
        align_threshold=PAGE_BYTES - 1,
    )
    return ENGINE_NAME
