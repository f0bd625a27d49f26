"""Traced models, made once and copied for each test."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.support.models.quantized import MAKERS
from tests.support.models.tiny_traces import tiny_model, trace_of


@cache
def _model(name: str) -> Any:
    return MAKERS[name]() if name in MAKERS else tiny_model(name)


@pytest.fixture
def traced() -> Callable[[str], Any]:
    """A function from a name to a fresh copy of that model's trace (``llama``, ``llama_tied`` or an architecture)."""
    return lambda name: trace_of(_model(name)).ir_model
