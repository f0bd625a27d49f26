"""Tiny models as a build loads them in half precision: traced, through the passes, and kept for other tests."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specexport.frontend import trace_checkpoint
from specexport.passes import default_passes, run_passes
from tests.engine_harness import make_checkpoint
from tests.tiny_models import ARCHITECTURES, make_model


class HalfModel(NamedTuple):
    """A model and its trace.

    Attributes:
        model: the transformers model.
        ir_model: after the passes; clone it before changing it.
    """

    model: Any
    ir_model: Any


class _Recipe(NamedTuple):
    dtype: str


def load(name: str, dtype: str) -> Any:
    """A model of ``ARCHITECTURES`` by way of the disk: loading, not ``model.half()``, leaves buffers in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(*ARCHITECTURES[name])
        model.save_pretrained(Path(folder))
        return type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@cache
def trace(name: str, dtype: str) -> HalfModel:
    """Load, trace and run the passes; ``dtype`` may be float32 too."""
    model = load(name, dtype)
    ir_model = trace_checkpoint(make_checkpoint(model)).ir_model
    run_passes(ir_model, default_passes(_Recipe(dtype)))
    return HalfModel(model, ir_model)
