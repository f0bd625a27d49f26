"""Lowerings of a backend without the rest of a build."""

from typing import Any

from specexport.lowering import ort_cpu, ort_cuda
from specexport.lowering.common import norm_type_pass
from specexport.lowering.fuse import fuse_rotary
from specexport.lowering.tensorrt import TrtAttentionPass


def lower_ort_cpu(model: Any, **options: bool) -> None:
    for item in ort_cpu.operator_passes(**options):
        item(model)


def lower_ort_cuda(model: Any) -> None:
    for item in ort_cuda.operator_passes():
        item(model)


def fuse_for_paging(model: Any, rows: int, limit: int | None) -> int:
    return fuse_rotary(model, rows, limit, ort_cuda.can_fuse_rotation)


def lower_tensorrt(model: Any, **options: Any) -> tuple[str, ...]:
    """Gives the form that each layer took."""
    attention = TrtAttentionPass(**options)
    for item in (norm_type_pass(), attention):
        item(model)
    return attention.forms
