"""Adding a backend takes a lowering, a file of `backends/`, an executor, and a line in each registry: done here so."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result

from specexport.backends import registry
from specexport.backends.base import Backend, BuildJob
from specexport.compile.pipeline import build_bundle
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.entry import EngineEntry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors import open as executors
from specexport_runtime.executors.base import EngineBackend, EngineRequest
from specexport_runtime.executors.ort import OrtExecutor
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair


def lower_toy(ir_model: Any) -> None:
    """Added file 1, the lowering: attention by operators that ONNX Runtime has, nothing fused."""
    from specexport.lowering.ort_cpu import operator_passes
    from specexport.passes.pipeline import run_lowering

    run_lowering(ir_model, operator_passes())


class Toy(Backend):
    """Added file 2, the backend."""

    name = "toy"
    dtypes = ("float32",)
    modules = ("onnxruntime",)
    extra = "cpu"
    options = ("gpu_memory_gb",)
    key_fields = ("gpu_memory_gb",)

    def build(self, ir_model: Any, job: BuildJob) -> EngineEntry:
        from specexport.backends.ort import write_onnx
        from specexport.lowering.common import step_inputs

        with job.clock.stage("lower", job.role, self.name):
            lower_toy(ir_model)
        with job.clock.stage("build", job.role):
            return EngineEntry(write_onnx(ir_model, job.folder), step_inputs(ir_model), lowering="toy")


class ToyExecutor(OrtExecutor):
    """Added file 3, the executor."""


def open_toy(request: EngineRequest) -> ToyExecutor:
    return ToyExecutor(
        request.folder / request.entry.engine.path, request.entry, num_rows=request.num_rows,
        kv_capacity=request.kv_capacity, num_threads=1, spin=False,
    )  # fmt: skip


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines: one in each registry."""
    module = ModuleType("toy_executor")
    module.BACKEND = EngineBackend(open_toy, modules=("onnxruntime",))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_executor", module)
    monkeypatch.setitem(registry.BACKENDS, "toy", Toy())
    monkeypatch.setitem(executors.PLACES, "toy", "toy_executor:BACKEND")


def generate(bundle: Path, **options: Any) -> list[list[int]]:
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, **options)
    results = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=12), num_speculative_tokens=3)
    assert isinstance(engine.target, OrtExecutor)
    engine.close()
    return [result.token_ids for result in results]


@pytest.mark.usefixtures("toy")
def test_a_new_backend_builds_checks_runs_and_is_known_everywhere(
    tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "toy"
    result = build_bundle(tiny_pair.recipe(out, backend="toy", gpu_memory_gb=8.0, max_num_seqs=3))
    assert max(error for error in result.max_abs_errors.values() if error is not None) < 1e-3, "it was checked"
    entry = load_manifest(out).models["target"]
    assert (entry.backend, entry.engine.lowering, entry.engine.padded) == ("toy", "toy", None)
    assert generate(out) == generate(tiny_bundle)
    with pytest.raises(IncompatibleError, match="padded KV needs backend ort-cpu; the target was built for toy"):
        SpecEngine.load(out, unpad_kv=False)
    shown: Result = run_cli("inspect", out, "--json")
    assert json.loads(shown.stdout)["models"]["target"]["backend"] == "toy"
    can = json.loads(run_cli("doctor", "--json").stdout)["can"]
    assert can["build bundles for toy"]
    assert can["run toy bundles"]
    monkeypatch.delitem(executors.PLACES, "toy")
    with pytest.raises(IncompatibleError, match="built for backend 'toy', which this runtime cannot run"):
        SpecEngine.load(out)
