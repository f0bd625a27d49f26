"""Mixture-of-experts layers in a form that traces: every expert's product as one batched matrix product."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRACEABLE = "batched_mm"


@contextmanager
def batched_experts(model: Any) -> Iterator[None]:
    """Within the block, expert layers run without data-dependent loops; afterwards they are as before."""
    can = getattr(model, "_can_set_experts_implementation", None)
    if can is None or not can():
        yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation(TRACEABLE)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
