"""ONNX Runtime engine files: the graph, and its weights in one file laid out for memory mapping."""

from pathlib import Path
from typing import TYPE_CHECKING

from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

ENGINE_NAME = "model.onnx"
PADDED_NAME = "model.padded.onnx"
DATA_NAME = "model.onnx.data"
PAGE_BYTES = 4096
INLINE_BYTES = 1024
"""Tensors up to this size stay inside the graph file."""
_IN_FLIGHT_BYTES = 256 << 20
"""Most of the weights that are computed and not yet written; a larger one is the only such one."""


def write_onnx(ir_model: "ir.Model", folder: Path, *, workers: int = 1) -> str:
    """Write ``model.onnx`` and ``model.onnx.data`` into ``folder``; returns the engine file's name.

    Weights of a page or more start on a page, so that a session can map them. ``workers`` are written at a time, and
    lazy ones are computed then: no second copy of the model is ever held. More than one needs weights that are computed
    apart (no ``Together``). The same model gives the same bytes. OSError if the disk is full, or the folder cannot be
    written.
    """
    import onnx_ir as ir

    folder.mkdir(parents=True, exist_ok=True)
    ir.save(
        ir_model,
        folder / ENGINE_NAME,
        external_data=DATA_NAME,
        size_threshold_bytes=INLINE_BYTES,
        max_workers=workers,
        max_in_flight_bytes=_IN_FLIGHT_BYTES,
        alignment=PAGE_BYTES,
        align_threshold=PAGE_BYTES - 1,
    )
    return ENGINE_NAME


def write_padded_onnx(ir_model: "ir.Model", folder: Path) -> str:
    """Write ``model.padded.onnx``, a graph over the weights that :func:`write_onnx` wrote; returns the file's name."""
    import onnx_ir as ir

    written = ir.load(folder / ENGINE_NAME).graph.initializers
    for weight, value in ir_model.graph.initializers.items():
        if weight not in written:
            raise CheckFailedError(f"the padded-KV graph has a weight of its own, {weight}.")
        value.const_value = written[weight].const_value
    ir.save(ir_model, folder / PADDED_NAME)
    return PADDED_NAME
