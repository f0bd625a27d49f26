"""ONNX Runtime engine files: the graph, and its weights in one file laid out for memory mapping."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

ENGINE_NAME = "model.onnx"
PADDED_NAME = "model.padded.onnx"
ONE_TOKEN_NAME = "model.one_token.onnx"  # noqa: S105 no password
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

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    import onnx_ir as ir

    folder.mkdir(parents=True, exist_ok=True)
    try:
        ir.save(
            ir_model,
            folder / ENGINE_NAME,
            external_data=DATA_NAME,
            size_threshold_bytes=INLINE_BYTES,
            alignment=PAGE_BYTES,
            align_threshold=PAGE_BYTES - 1,
        )
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy says only how much of an array it could write.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / DATA_NAME)) from error
    return ENGINE_NAME


def write_padded_onnx(ir_model: "ir.Model", folder: Path) -> str:
    """Write ``model.padded.onnx``: another graph over the weights that :func:`write_onnx` has written.

    Args:
        ir_model: the padded-KV graph, lowered from a copy of the same traced model; its weights are let go.
        folder: where ``model.onnx`` is.

    Returns:
        the file's name.

    Raises:
        CheckFailedError: the graph has a weight that ``model.onnx`` has not.
    """
    return _write_sharing(ir_model, folder, PADDED_NAME, "padded-KV")


def write_one_token_onnx(ir_model: "ir.Model", folder: Path) -> str:
    """Write ``model.one_token.onnx``, the graph for steps of one token a row, like :func:`write_padded_onnx`."""
    return _write_sharing(ir_model, folder, ONE_TOKEN_NAME, "one-token")


def _write_sharing(ir_model: "ir.Model", folder: Path, name: str, kind: str) -> str:
    import onnx_ir as ir

    written = ir.load(folder / ENGINE_NAME).graph.initializers
    for weight, value in ir_model.graph.initializers.items():
        if weight in written:
            value.const_value = written[weight].const_value
        elif not (_is_size(value.const_value) and kind == "one-token"):
            raise CheckFailedError(f"the {kind} graph has a weight of its own, {weight}.")
    ir.save(ir_model, folder / name)
    return name


def _is_size(tensor: "ir.TensorProtocol | None") -> bool:
    """Whether a constant is no weight but the sizes that a node reshapes to."""
    return tensor is not None and tensor.dtype.is_integer() and tensor.nbytes <= INLINE_BYTES
