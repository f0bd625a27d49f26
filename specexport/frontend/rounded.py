"""Weights rounded to 16 bits, in a model that goes on computing in its own type."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.stored import Stored
from specexport_runtime.errors import CheckpointError


def round_weights(checkpoint: Checkpoint, dtype: str) -> None:
    """Give each weight the value that it has in ``dtype``, a numpy name; the model's own type stays.

    Raises ``CheckpointError`` if one is larger than float16 can hold, where that is ``dtype``.
    """
    kind = getattr(torch, dtype)
    for parameter in checkpoint.model.parameters():
        if not parameter.is_meta:  # those are in ``stored``
            parameter.data = _rounded(parameter.data, kind)
    checkpoint.stored = {
        name: replace(weight, rows=partial(_rounded_rows, weight.rows, kind))
        for name, weight in checkpoint.stored.items()
    }
    if kind == torch.float16:
        refuse_overflow(checkpoint.source, checkpoint.model, checkpoint.stored)


def refuse_overflow(source: str, model: Any, stored: Stored) -> None:
    """Refuse (``CheckpointError``) weights beyond 65504, the end of float16, which have become infinite by now."""
    for name, weight in model.named_parameters():
        found = stored[name].parts() if name in stored else [weight]
        if not all(bool(torch.isfinite(part).all()) for part in found):
            raise CheckpointError(f"{source}: {name} holds values that float16 cannot.", "use --dtype bfloat16.")


def _rounded(values: Tensor, kind: torch.dtype) -> Tensor:
    return values.to(kind).to(values.dtype)


def _rounded_rows(rows: Any, kind: torch.dtype, start: int, stop: int) -> Tensor:
    return _rounded(rows(start, stop), kind)
