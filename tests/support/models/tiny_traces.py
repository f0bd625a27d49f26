"""The tiny models and what torch exports of them, made once; models that differ in weights only share an export."""

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Callable
from copy import copy
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_model
from tests.support.references.engine_harness import make_checkpoint

_TRACES: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()
_EXPORTS: dict[str, Any] = {}
_LARGEST = 20_000_000
"""Weights of a model whose export is kept, at most: it keeps the first model's weights in memory."""
_EXPORTERS = ("trace.export", "heads.trace")
_NOT_EXPORTED = {
    *("_parameters", "_buffers", "_modules"),  # compared one by one
    *("name_or_path", "_name_or_path", "generation_config", "_weight_conversions", "_use_kernels"),
}
"""Of modules: what decides no export, and differs if a model is saved and loaded."""
_NOT_READ = {
    *("_name_or_path", "name_or_path", "architectures", "model_type", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id"),
}
"""Likewise, of configurations."""
shares_exports = True
"""Whether the test that runs takes part; set by ``conftest.py``."""
folder: Path | None = None
"""Where exports lie for other workers, and for the next run over the same sources; set by ``conftest.py``."""
_DECIDES = ("specexport", "runtime/specexport_runtime/abi.py", "tests/support/models/tiny_traces.py")
_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")


def exports_of(root: Path = Path(__file__).parents[3]) -> Path:
    """The folder of exports by these sources, Python and packages; those of others go after a day."""
    found = hashlib.sha256(f"{sys.version} {[version(name) for name in _PACKAGES]}".encode())
    for name in _DECIDES:
        for path in sorted([root / name] if name.endswith(".py") else (root / name).rglob("*.py")):
            found.update(path.read_bytes())
    wanted = root / "build" / "exports" / found.hexdigest()[:16]
    wanted.mkdir(parents=True, exist_ok=True)
    for other in wanted.parent.iterdir():
        if other != wanted and time.time() - other.stat().st_mtime > 86_400:  # a run over those may be going on
            shutil.rmtree(other, ignore_errors=True)
    return wanted


class Unknown(Exception):
    """A module has something that decides its export, perhaps, and cannot be compared."""


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
def tiny_model(name: str, **config: Any) -> Any:
    """The model of an architecture. Others use it too: who changes a model makes one with ``make_model``."""
    classes, given = (ARCHITECTURES | HYBRIDS)[name]
    return make_model(classes, given | config)


def trace_of(model: Any, *, group_experts: bool = False) -> Any:
    """The trace of a model, with a graph of one's own; its weights are the model's."""
    from specexport.trace.check import trace_checkpoint

    traces = _TRACES.setdefault(model, {})
    if group_experts not in traces:
        traces[group_experts] = trace_checkpoint(make_checkpoint(model), group_experts=group_experts)
    traced = traces[group_experts]
    return traced._replace(ir_model=traced.ir_model.clone())


def share_exports(shares: bool) -> None:
    """Let exports be shared by the modules that are imported by now, or not for the test that comes."""
    global shares_exports  # noqa: PLW0603 - one test runs at a time
    shares_exports = shares
    for name in _EXPORTERS:
        module: Any = sys.modules.get(f"specexport.{name}")
        if module is not None and not hasattr(module.trace_step, "__wrapped__"):
            module.trace_step = _sharing(module.trace_step)


def _sharing(trace_step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace_step)
    def shared(packed: Any, *given: Any, **options: Any) -> Any:
        try:
            key = structure_of(packed, given, options) if shares_exports else None
        except Unknown:
            key = None
        if key is None:
            return trace_step(packed, *given, **options)
        if key not in _EXPORTS:
            _EXPORTS[key] = _once(key, lambda: trace_step(packed, *given, **options))
        ir_model = _EXPORTS[key].clone()
        own = dict(packed.named_parameters(remove_duplicate=False))
        for name, value in ir_model.graph.initializers.items():
            if name in own:
                value.const_value = type(value.const_value)(own[name].data, name=name)
        return ir_model

    return shared


def _once(key: str, export: Callable[[], Any]) -> Any:
    """An export of this worker, or of the one that had the same to export before."""
    keep_operator_table()
    if folder is None:
        return export()
    path = folder / f"{key}.onnx"
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.is_file():
            return read_export(path)
        ir_model = export()
        write_export(ir_model, path)
        return ir_model


def write_export(ir_model: Any, path: Path) -> None:
    """Keep an export, with the weights of the model it was made of."""
    import onnx_ir as ir

    part = path.with_suffix(".part")
    part.write_bytes(ir.to_proto(ir_model).SerializeToString())
    part.replace(path)


def read_export(path: Path) -> Any:
    """The export in a file, its weights in the memory of torch as the exporter leaves them."""
    import onnx
    import onnx_ir as ir
    import torch
    from onnx_ir.tensor_adapters import to_torch_dtype
    from torch.onnx._internal.exporter._core import TorchTensor

    ir_model = ir.from_proto(onnx.load(path))
    for name, value in ir_model.graph.initializers.items():
        stored = value.const_value
        tensor = torch.empty(tuple(stored.shape), dtype=to_torch_dtype(stored.dtype))
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(stored.tobytes()), dtype=torch.uint8))
        value.const_value = TorchTensor(tensor, name=name)
    return ir_model


def structure_of(module: Any, *more: Any) -> str | None:
    """Hash of all that decides what torch exports, not the weights' values. None for a large one; may raise Unknown."""
    found = hashlib.sha256(_told(more).encode())
    first: dict[int, str] = {}
    if sum(parameter.numel() for parameter in module.parameters()) > _LARGEST:
        return None
    for name, part in module.named_modules(remove_duplicate=False):
        values = {k: v for k, v in vars(part).items() if k not in _NOT_EXPORTED and "state_dict" not in k}
        if any(value for key, value in values.items() if "_hooks" in key):
            raise Unknown(name)
        found.update(f"{name} {_told(type(part))} {_told(values)}".encode())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        found.update(f"{name} {same} {parameter.dtype} {tuple(parameter.shape)}".encode())
    found.update(_told(dict(module.named_buffers(remove_duplicate=False))).encode())
    return found.hexdigest()


def _told(value: Any) -> str:
    """A value in words that are the same for equal ones only."""
    import torch

    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_told(key)}: {_told(each)}' for key, each in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_told, value)))}}}"
    if isinstance(value, (list, tuple)):  # configurations have lists where they were made of tuples
        name = "list" if type(value) is tuple else type(value).__name__
        return f"{name}({', '.join(map(_told, value))})"
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            raise Unknown("a tensor without data")
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, type) or (isinstance(value, FunctionType) and value.__closure__ is None):
        text = f"{value.__module__}.{value.__qualname__}"
        if "<" not in text:
            return text
        if isinstance(value, type) and text.startswith("specexport."):  # made for the classes that it extends
            return f"{text} {_told(value.__bases__)}"
        raise Unknown(text)
    if hasattr(value, "to_json_string"):  # configurations, which also say how to compute attention and experts
        return f"{_told(type(value))} {_told({k: v for k, v in vars(value).items() if k not in _NOT_READ})}"
    if hasattr(value, "__dataclass_fields__"):
        return f"{_told(type(value))} {_told({name: getattr(value, name) for name in value.__dataclass_fields__})}"
    text = repr(value)
    if isinstance(value, torch.nn.Module) or " at 0x" in text:
        raise Unknown(text)
    return text
