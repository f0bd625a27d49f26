"""What doctor says of a machine, its GPU and the packages: one line each, with a remedy for what is missing."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from specexport.doctor import command as doctor
from specexport.doctor import gpu, versions
from specexport.doctor.finding import Finding
from specexport_runtime.errors import CheckFailedError, IncompatibleError
from specexport_runtime.executors import ort_cuda_package
from specexport_runtime.executors.ort_cuda_package import CODE, are_both_installed, explain_missing_code, run_step
from specexport_runtime.executors.trt_open import RTX_SM
from tests.support.cases.present_gpu import has_gpu
from tests.support.cases.refusals import RunCli


def test_this_machine_can_build_and_run(run_cli: RunCli) -> None:
    result = run_cli("doctor", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["can"]["build bundles for ort-cpu"]
    assert data["can"]["run ort-cpu bundles"]
    assert data["can"]["build bundles for tensorrt-rtx"], "a dev environment builds engines without a GPU"
    topics = [finding["topic"] for finding in data["findings"]]
    assert topics == ["python", "cores", "memory", "cpu features", "CPU operators", "onnxruntime", "export stack",
                      "gpu", "tensorrt", "cache"]  # fmt: skip
    text = run_cli("doctor").stdout
    assert all(topic in text for topic in topics)


def test_without_onnxruntime_nothing_runs_and_it_says_how_to_mend_that(run_cli, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    result = run_cli("doctor")
    assert result.exit_code == 1
    assert "pip install -e '.[cpu]'" in result.stdout
    assert "cannot" in result.stdout


def test_without_the_export_stack_bundles_still_run(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "onnxscript"):
            raise doctor.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    result = run_cli("doctor", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert [name for name, possible in data["can"].items() if possible] == ["run ort-cpu bundles"]
    (stack,) = (finding for finding in data["findings"] if finding["topic"] == "export stack")
    assert stack["found"] == "without onnxscript, torch"
    assert "pip install -e '.[export]'" in stack["fix"]


def test_a_gpu_runs_what_is_installed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = ("python", "CPU operators", "onnxruntime", "export stack", "gpu")
    findings = [Finding(topic, "ok", "CPUExecutionProvider") for topic in topics]
    monkeypatch.setattr(doctor, "_installed", lambda module: module in ("tensorrt", "cuda"))
    able = {name for name, possible in doctor.capabilities(findings).items() if possible}
    assert {"run tensorrt bundles", "build bundles for tensorrt"} <= able
    assert "run ort-cuda bundles" not in able
    assert "run tensorrt-rtx bundles" not in able
    with_cuda = [found._replace(found="CUDAExecutionProvider") for found in findings]
    assert doctor.capabilities(with_cuda)["run ort-cuda bundles"]
    without_gpu = [found._replace(state="note") if found.topic == "gpu" else found for found in with_cuda]
    assert not any(doctor.capabilities(without_gpu)[f"run {name} bundles"] for name in ("tensorrt", "ort-cuda"))


@pytest.mark.parametrize(
    ("installed", "inside"),
    [("1.31.1", True), ("1.31.0", True), ("1.31", True), ("1.30.9", False), ("1.32.0", False), ("1.31.1+cpu", True)],
)
def test_versions_are_held_against_the_tested_range(installed: str, inside: bool) -> None:
    assert (versions.outside_tested_range("onnxruntime", installed, extra="cpu") == "") is inside
    ranges = dict(versions.tested_ranges("export"))  # of the installed package
    assert set(ranges) >= {"torch", "transformers", "onnx", "onnx-ir"}
    assert "pytest" not in ranges


def test_a_container_limit_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (64 * 10**9, 60 * 10**9, 10**9))
    finding = doctor._memory()
    assert finding.state == "note"
    assert "1.0 GB, 1.0 GB free (container limit)" in finding.found


MakeCard = Callable[..., None]
NO_RTX = "build bundles with --backend tensorrt for this GPU."
RTX_4090 = "NVIDIA GeForce RTX 4090, 580.159.04, 24564 MiB, 8.9"
MEM = "580.1, 183359 MiB"
OLD, B200, H200 = "NVIDIA L4, 535.104.05, 23034 MiB, 8.9", f"NVIDIA B200, {MEM}, 10.0", f"NVIDIA H200, {MEM}, 9.0"
DRIVER, OTHERS = "NVIDIA driver 580 or newer", "build bundles with --backend ort-cuda or tensorrt for this GPU."
REINSTALL = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install -e '.[cuda]' in the clone of specexport."


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeCard:
    """A machine with one GPU, as ``nvidia-smi`` describes it, and a package with the CUDA provider."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setattr(shutil, "which", lambda _name: str(tool))

    def make(line: str, version: str = "1.31.1", providers: tuple[str, ...] = (ort_cuda_package.CUDA,)) -> None:
        tool.write_text(f"#!/bin/sh\necho '{line}'\n")
        tool.chmod(0o755)
        spec = ModuleSpec("onnxruntime", None)
        fake = SimpleNamespace(__version__=version, __spec__=spec, get_available_providers=lambda: [*providers])
        monkeypatch.setitem(sys.modules, "onnxruntime", fake)
        monkeypatch.setattr(gpu, "import_onnxruntime", lambda _device: fake)
        monkeypatch.setattr(gpu, "run_step", lambda _ort, _device: None)

    return make


def found() -> dict[str, Finding]:
    return {finding.topic: finding for finding in gpu.examine_gpu()}


def test_no_gpu_is_said_once(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert [finding.topic for finding in gpu.examine_gpu()] == ["gpu"]
    assert run_cli("doctor").stdout.count("no GPU") == 1


@pytest.mark.parametrize(
    ("line", "topic", "state", "said", "fix"),
    [
        (RTX_4090, "gpu", "ok", "NVIDIA GeForce RTX 4090, 24564 MiB, sm89", ""),
        (RTX_4090, "ort-cuda", "ok", "onnxruntime-gpu 1.31.1 ran a step on NVIDIA GeForce RTX 4090", ""),
        (OLD, "driver", "missing", "535.104.05; onnxruntime-gpu, TensorRT and cuda-python", f"install {DRIVER}."),
        (B200, "ort-cuda", "missing", "capability 10.0, as of a B200 or GB200", NO_RTX),
        ("NVIDIA Thor, 580.1, [N/A], 11.0", "ort-cuda", "missing", "capability 11.0, as of a Thor", NO_RTX),
        (H200, "ort-cuda", "ok", "ran a step on NVIDIA H200", ""),
        (H200, "tensorrt-rtx", "missing", "1.7 is not for sm90, only for sm 75, 80, 86, 89, 120, 121", OTHERS),
        ("", "gpu", "note", "no GPU (nvidia-smi lists none)", ""),
    ],
)
def test_what_is_found_of_a_card(card, run_cli, line, topic, state, said, fix):
    card(line)
    finding = found()[topic]
    assert (finding.topic, finding.state, finding.fix) == (topic, state, fix)
    assert said in finding.found
    able = json.loads(run_cli("doctor", "--json").stdout)["can"]
    unable = {OLD: ("ort-cuda", "tensorrt", "tensorrt-rtx"), B200: ("ort-cuda", "tensorrt-rtx")}.get(line, ())
    assert not any(able[f"run {name} bundles"] for name in unable)


def test_a_driver_or_a_package_that_is_broken_or_not_there(card, tmp_path, monkeypatch):
    card(RTX_4090, providers=("CPUExecutionProvider",))
    assert found()["ort-cuda"] == Finding("ort-cuda", "missing", "onnxruntime is the package for CPUs", REINSTALL)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert found()["ort-cuda"].fix == "pip install -e '.[cuda]' in the clone of specexport."
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert found()["gpu"].fix == f"mend the driver, or install {DRIVER}."


def test_the_architectures_of_tensorrt_rtx_are_the_packages_own() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    names = trt.ComputeCapability.__members__
    assert tuple(sorted(int(name[2:]) for name in names if name.startswith("SM"))) == RTX_SM


@pytest.mark.parametrize(
    ("capability", "runs"), [(75, True), (80, True), (87, True), (70, False), (121, True), (100, False), (0, True)]
)
def test_code_runs_on_later_gpus_of_its_generation(capability: int, runs: bool) -> None:
    assert (explain_missing_code("1.31.1", capability) is None) is runs
    assert explain_missing_code("1.99", capability) is None, "what another version has is not known"
    assert 90 in CODE["1.31.1"]


@pytest.mark.parametrize(
    ("failure", "said", "fix"),
    [
        (IncompatibleError("CUDA failure 35.", "a new driver."), "CUDA failure 35.", "a new driver."),
        (RuntimeError("x.cc:1 (f) CUDA failure 209: no kernel image; GPU=0"), "CUDA failure 209: no kernel", REINSTALL),
        (CheckFailedError("8 products and a sum gave [0] on the GPU, not 9."), "gave [0]", ""),
    ],
)
def test_a_step_that_fails_says_why(card, monkeypatch, failure, said, fix):
    card(RTX_4090)
    monkeypatch.setattr(gpu, "run_step", lambda _ort, _device: (_ for _ in ()).throw(failure))
    finding = found()["ort-cuda"]
    assert (finding.state, finding.fix) == ("missing", fix)
    assert said in finding.found


def test_both_packages_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    versions = {"onnxruntime": "1.31.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(ort_cuda_package, "version", version)
    assert not are_both_installed()
    assert doctor._onnxruntime().state == "ok"
    versions["onnxruntime-gpu"] = "1.31.1"
    finding = doctor._onnxruntime()
    assert finding.state == "note"
    assert "onnxruntime and onnxruntime-gpu are both installed" in finding.found
    assert finding.fix == REINSTALL.replace("cuda", "cpu")
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    assert doctor._onnxruntime().fix == REINSTALL, "with a GPU it is the package for that"


class OnTheCpu:
    """onnxruntime whose GPU is the CPU."""

    SessionOptions = onnxruntime.SessionOptions
    OrtValue = SimpleNamespace(
        ortvalue_from_numpy=lambda array, _device, _index: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu", 0)
    )

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def InferenceSession(self, model: bytes, _options: object, providers: list[tuple[str, dict[str, str]]]) -> object:
        assert providers == [(ort_cuda_package.CUDA, {"device_id": "0"})]
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        there = SimpleNamespace(
            bind_ortvalue_input=binding.bind_ortvalue_input,
            bind_output=lambda name, _device, _index: binding.bind_output(name, "cpu", 0),
            copy_outputs_to_cpu=lambda: [self.factor * array for array in binding.copy_outputs_to_cpu()],
        )
        return SimpleNamespace(
            io_binding=lambda: there, run_with_iobinding=lambda _binding: session.run_with_iobinding(binding)
        )


def test_the_step_is_a_graph_that_computes() -> None:
    model = onnx.load_from_string(ort_cuda_package._STEP)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Add"]
    session = onnxruntime.InferenceSession(ort_cuda_package._STEP, providers=["CPUExecutionProvider"])
    assert np.unique(session.run(None, {"x": np.ones((8, 8), np.float16)})[0]).tolist() == [9]
    run_step(OnTheCpu(), 0)
    with pytest.raises(CheckFailedError, match=r"gave \[18.0\] on the GPU"):
        run_step(OnTheCpu(factor=2), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU")
def test_this_gpu_runs_a_step(run_cli: RunCli) -> None:
    if ort_cuda_package.CUDA not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    assert found()["ort-cuda"].state == "ok", found()["ort-cuda"]
    assert json.loads(run_cli("doctor", "--json").stdout)["can"]["run ort-cuda bundles"]
