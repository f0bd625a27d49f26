"""Tiny models as a build loads them in half precision: traced, through the passes, and kept for other tests."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specexport.passes.pipeline import default_passes, run_passes
from tests.support.models.tiny_models import ARCHITECTURES, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of


class HalfModel(NamedTuple):
    """A model and its trace after the passes, to be cloned before a change."""

    model: Any
    ir_model: Any
    layers: Any


def load(architecture: tuple[str, dict[str, Any]], dtype: str) -> Any:
    """A model by way of the disk: loading, not ``model.half()``, leaves buffers in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(*architecture)
        model.save_pretrained(Path(folder))
        return type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@cache
def trace(name: str, dtype: str, *, pack: bool = False) -> HalfModel:
    model = tiny_model(name) if dtype == "float32" else load(ARCHITECTURES[name], dtype)
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes(dtype, pack=pack))
    return HalfModel(model, traced.ir_model, traced.layers)
