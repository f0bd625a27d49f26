"""The tiny models and their traces, made once in a process: to trace takes seconds, to copy a graph milliseconds."""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from tests.engine_harness import make_checkpoint
from tests.tiny_models import ARCHITECTURES, make_model

_TRACES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@cache
def tiny_model(name: str) -> Any:
    """The model of an architecture. Others use it too: who changes a model makes one with ``make_model``."""
    return make_model(*ARCHITECTURES[name])


def trace_of(model: Any) -> Any:
    """The trace of a model, with a graph of one's own; its weights are the model's."""
    from specexport.frontend import trace_checkpoint

    if model not in _TRACES:
        _TRACES[model] = trace_checkpoint(make_checkpoint(model))
    traced = _TRACES[model]
    return traced._replace(ir_model=traced.ir_model.clone())
