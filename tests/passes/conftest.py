"""Traced models, made once and copied for each test."""

from collections.abc import Callable
from typing import Any

import pytest

from specexport.frontend import trace_checkpoint
from tests.engine_harness import make_checkpoint
from tests.tiny_models import ARCHITECTURES, make_llama, make_model


@pytest.fixture(scope="package")
def _traces() -> dict[str, Any]:
    return {}


@pytest.fixture
def traced(_traces: dict[str, Any]) -> Callable[[str], Any]:
    """A function from a name to a fresh copy of that model's trace (``llama``, ``llama_tied`` or an architecture)."""

    def get(name: str) -> Any:
        if name not in _traces:
            wide = {"hidden_size": 128, "head_dim": 32}
            makers = {
                "llama": lambda: make_llama(**wide),
                "llama_tied": lambda: make_llama(tie_word_embeddings=True, **wide),
            }
            model = makers[name]() if name in makers else make_model(*ARCHITECTURES[name])
            _traces[name] = trace_checkpoint(make_checkpoint(model)).ir_model
        return _traces[name].clone()

    return get
