"""The tiny models and their traces, made once in a process: to trace takes seconds, to copy a graph milliseconds."""

import hashlib
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from tests.engine_harness import make_checkpoint
from tests.tiny_models import ARCHITECTURES, make_model

_TRACES: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()
_EXPORTS: dict[str, Any] = {}


@cache
def keep_operator_table() -> None:
    """Let torch read its table of operators once in a process: it does so in every export, a quarter of a tiny one."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    @cache
    def read(opset: int) -> Any:
        return make(opset)

    def from_torchlib(_: type, opset_version: int = 18) -> Any:
        table = copy(read(opset_version))
        table.functions = {name: list(found) for name, found in table.functions.items()}  # an export adds its own
        return table

    make = ONNXRegistry.from_torchlib
    ONNXRegistry.from_torchlib = classmethod(from_torchlib)


@cache
def tiny_model(name: str) -> Any:
    """The model of an architecture. Others use it too: who changes a model makes one with ``make_model``."""
    return make_model(*ARCHITECTURES[name])


def trace_of(model: Any, *, group_experts: bool = False) -> Any:
    """The trace of a model, with a graph of one's own; its weights are the model's."""
    from specexport.frontend import trace_checkpoint

    traces = _TRACES.setdefault(model, {})
    if group_experts not in traces:
        keep_operator_table()
        traces[group_experts] = trace_checkpoint(make_checkpoint(model), group_experts=group_experts)
    traced = traces[group_experts]
    return traced._replace(ir_model=traced.ir_model.clone())


def export_once(patch: pytest.MonkeyPatch) -> None:
    """Let builds of equal checkpoints share what torch exports; all that a build checks of a model is still checked."""
    from specexport import frontend

    check_and_trace = frontend.trace_checkpoint

    def trace_checkpoint(checkpoint: Any, features: Any = None, **options: bool) -> Any:
        from specexport.frontend import trace

        if features is not None:  # what a head reads is its own
            return check_and_trace(checkpoint, features, **options)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(trace, "trace_model", partial(_export, trace.trace_model))
            return check_and_trace(checkpoint, **options)

    patch.setattr(frontend, "trace_checkpoint", trace_checkpoint)


def _export(trace_model: Callable[..., Any], model: Any, calls: Any, stored: Any, features: None = None) -> Any:
    from specexport.frontend.stored import stored_tensor

    assert features is None
    key = _content(model, calls)
    if key not in _EXPORTS:
        keep_operator_table()
        _EXPORTS[key] = trace_model(model, calls, stored)
    ir_model = _EXPORTS[key].ir_model.clone()
    for name, value in ir_model.graph.initializers.items():  # those of this checkpoint's files
        if name.removeprefix("model.") in stored:
            value.const_value = stored_tensor(name, stored[name.removeprefix("model.")])
    return _EXPORTS[key]._replace(ir_model=ir_model)


def _content(model: Any, calls: Any) -> str:
    """Hash of a model: its class and configuration, what its layers ask of attention, its weights and buffers."""
    import torch

    how = model.config._experts_implementation
    found = hashlib.sha256(f"{type(model)} {model.config.to_json_string()} {calls} {how}".encode())
    for name, tensor in (model.state_dict() | dict(model.named_buffers())).items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta":
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
