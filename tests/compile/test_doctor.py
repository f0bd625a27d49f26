import importlib.util
import json
import shutil

import pytest

from specexport.doctor import command as doctor
from specexport.doctor import versions
from specexport.doctor.finding import Finding
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


def test_without_onnxruntime_nothing_runs_and_it_says_how_to_mend_that(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_tested_ranges_come_from_the_installed_package() -> None:
    ranges = dict(versions.tested_ranges("export"))
    assert set(ranges) >= {"torch", "transformers", "onnx", "onnx-ir"}
    assert ranges["torch"].startswith(("<", ">="))
    assert "pytest" not in ranges


def test_a_container_limit_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (64 * 10**9, 60 * 10**9, 10**9))
    finding = doctor._memory()
    assert finding.state == "note"
    assert "1.0 GB, 1.0 GB free (container limit)" in finding.found
