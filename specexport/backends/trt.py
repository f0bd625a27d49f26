"""TensorRT engine files, for both packages: the lowered graph goes to a worker process for each architecture."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.backends.base import ANY_ARCHITECTURE
from specexport.backends.profiles import input_shapes
from specexport.plugin.naming import plugin_names
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.entry import EngineFile, EngineReport
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import (
    CheckFailedError,
    IncompatibleError,
    MissingDependencyError,
    RecipeError,
    SpecexportError,
    UnsupportedModelError,
)
from specexport_runtime.schema import from_json

if TYPE_CHECKING:
    import onnx_ir as ir

_LAST_LINES = 5
_FRUGAL_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc: give memory back at once. The builder allocates and frees a lot; its peak is an eighth lower with this."""


class TrtPlan(NamedTuple):
    """What a TensorRT build needs to know besides the graph."""

    backend: str  # ``"tensorrt"`` or ``"tensorrt-rtx"``
    architectures: tuple[str, ...]  # one engine is built for each, for example ``("89", "120")``
    profiles: tuple[Profile, ...]  # optimization profiles, in the engine's order
    layers: tuple[LayerGeometry, ...]  # cache sizes
    kv_capacity: int  # L
    feature_size: int = 0  # E of a draft head


def label(sm: str) -> str:
    """An architecture as the manifest, messages and file names have it: ``"sm89"``, or ``"any"``."""
    return sm if sm == ANY_ARCHITECTURE else f"sm{sm}"


def engine_name(sm: str) -> str:
    """File name of the engine for an architecture."""
    return f"model.{label(sm)}.engine"


def write_trt_engines(
    ir_model: "ir.Model", plan: TrtPlan, folder: Path, *, note: Callable[[str], None], names: Sequence[str]
) -> tuple[EngineFile, ...]:
    """Build an engine and its log for each architecture into ``folder``; paths are relative to it."""
    import onnx_ir as ir

    folder.mkdir(parents=True, exist_ok=True)
    sizes = (names, plan.layers, plan.kv_capacity, plan.feature_size)
    shapes = [input_shapes(profile, *sizes) for profile in plan.profiles]
    products = [str(node.name) for node in ir_model.graph if _is_float32_product(node)]
    # Beside the engines, so that it is on the same disk, and hidden, so that it can never be taken for one.
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as scratch:
        model = Path(scratch) / "model.onnx"
        ir.save(ir_model, model, external_data="model.data", size_threshold_bytes=1024)
        for value in ir_model.graph.initializers.values():
            value.const_value = None
        engines: list[EngineFile] = []
        for sm in plan.architectures:
            note(f"{label(sm)}: {len(plan.profiles)} profiles")
            job = {
                "backend": plan.backend,
                "model": str(model),
                "sm": sm,
                "profiles": [profile.name for profile in plan.profiles],
                "shapes": shapes,
                "engine": str(folder / engine_name(sm)),
                "log": str(folder / f"model.{label(sm)}.log"),
                "num_layers": len(plan.layers),
                "float32_products": products,
                "plugins": plugin_names(ir_model),
            }
            report = _run_worker(job, Path(scratch), partial(_note_for, note, sm))
            engines.append(_engine_file(plan.backend, sm, report))
    return tuple(engines)


def _is_float32_product(node: "ir.Node") -> bool:
    first = node.inputs[0] if node.op_type in ("MatMul", "Gemm") else None
    return first is not None and first.dtype is not None and first.dtype.name == "FLOAT"


def _note_for(note: Callable[[str], None], sm: str, text: str) -> None:
    note(f"{label(sm)}: {text}")


def _engine_file(backend: str, sm: str, report: Mapping[str, Any]) -> EngineFile:
    kept = {name: report[name] for name in EngineReport._fields}
    return EngineFile(
        path=engine_name(sm),
        sm=label(sm),
        builder=backend,
        builder_version=str(report["version"]),
        memory_bytes=report["activation_bytes"],
        report=from_json(EngineReport, kept),
    )


def _run_worker(job: Mapping[str, Any], scratch: Path, note: Callable[[str], None]) -> dict[str, Any]:
    path = scratch / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "specexport.backends.trt_worker", str(path)]
    with (
        (scratch / "stderr").open("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(  # noqa: S603 - ourselves
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | _FRUGAL_MALLOC
        ) as worker,
    ):
        try:
            events = [_parse_event(line, note) for line in worker.stdout or ()]
        except BaseException:
            worker.kill()
            raise
    last = next((event for event in reversed(events) if event.get("event") in ("done", "error")), None)
    if last is None:
        said_last = _tail((scratch / "stderr").read_text(encoding="utf-8", errors="replace"))
        raise _make_exit_error(worker.returncode, job, said_last or _tail(Path(job["log"]).read_text(encoding="utf-8")))
    if last["event"] == "error":
        raise _error(last)
    report: dict[str, Any] = last["report"]
    return report


def _parse_event(line: str, note: Callable[[str], None]) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # a native library printed something
        return {}
    if event.get("event") == "progress":
        note(f"{event['phase']} {event['done']}/{event['total']}")
    return event


_ERRORS: Mapping[str, type[SpecexportError]] = {
    kind.__name__: kind for kind in (IncompatibleError, MissingDependencyError, RecipeError, UnsupportedModelError)
}


def _error(event: Mapping[str, Any]) -> SpecexportError:
    return _ERRORS.get(event["kind"], CheckFailedError)(event["message"], event["hint"])


def _tail(text: str) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-_LAST_LINES:])


def _make_exit_error(code: int | None, job: Mapping[str, Any], said: str) -> SpecexportError:
    if code == -9:  # the kernel ends processes when memory runs out
        return IncompatibleError(
            f"the TensorRT builder for {label(job['sm'])} was killed: this machine has too little memory.",
            "close other programs, or build on a machine with more memory.",
        )
    return CheckFailedError(
        f"the TensorRT builder for {label(job['sm'])} ended with code {code}: {said or 'no message'}."
    )
