"""What only a GPU can show, without one: the tests of tests/gpu over TensorRT's executor, and the script over CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors import cuda_driver, trt_engine
from tests.gpu import conftest, test_graphs, test_outputs, test_steps
from tests.support.fakes import loop, trt_bundles, trt_fakes

ROOT = Path(__file__).parents[2]


class FakeMachine:
    """A machine whose drivers are fake GPUs of the architecture that the engine is for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = trt_bundles.write_bundle(folder)
        self.gpus: list[Any] = []
        self.opened: list[str] = []
        monkeypatch.setattr(cuda_driver, "CudaDriver", self.make_gpu)
        monkeypatch.setattr(trt_engine, "load_engine", self.load)
        monkeypatch.setattr(conftest, "build", lambda *_, **__: self.folder)

    def make_gpu(self) -> Any:
        self.gpus.append(trt_fakes.FakeGpu(sm="sm120"))
        return self.gpus[-1]

    def load(self, path: Path, file: Any, gpu_name: str) -> Any:
        role = path.parent.name
        self.opened.append(path.name)
        entry = load_bundle(self.folder).manifest.models[role]
        model = loop.make_target() if role == "target" else loop.make_draft("good")
        return trt_fakes.FakeEngine(self.gpus[-1], entry, model)


def test_the_tests_run_over_tensorrts_executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine, rows = FakeMachine(monkeypatch, tmp_path / "bundle"), conftest.Rows(tmp_path / "out", tiny=True)
    with conftest.Engines("tensorrt-rtx", tmp_path, tiny=True) as engines:
        test_outputs.check_logits("x", engines.open(), engines.open(), rows)
        test_outputs.check_greedy("x", engines.open(), engines.open(), rows)
        test_graphs.test_graphs_and_single_kernels_give_the_same(engines, rows)
        test_graphs.test_drafts_in_a_chain_are_those_with_a_wait_a_step(engines, rows)
        test_steps.measure_steps("x", engines.open(), {8: ((4, (4,)),)}, rows)
    assert not rows.wrong
    assert set(machine.opened) == {"model.sm120.engine"}
    assert all(gpu.in_use == 0 for gpu in machine.gpus)
    assert rows.found["tensorrt-rtx: texts and accepted drafts of chains, batch 4"][0] == "equal"
    assert rows.found["x: greedy, 4 prompts x 16 tokens"][2]["equal"] == 64
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == list(rows.found)
    table = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert len(table) == 2 + len(lines)


def run_script(tmp_path: Path, call: str, only: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    given = {"SPECEXPORT_GPU_TINY": "1", "PYTHON": sys.executable, "BACKEND": "ort-cpu", "MINUTES": "60", "ONLY": only}
    folders = {f"SPECEXPORT_GPU_{name.upper()}": str(tmp_path / name) for name in ("out", "work")}
    command = ["bash", str(ROOT / "tools" / "gpu.sh"), call]
    return subprocess.run(
        command,
        env=os.environ | given | folders | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )


def test_a_part_that_failed_or_ended_is_not_run_again_and_one_without_time_is(tmp_path: Path) -> None:
    first = run_script(tmp_path, "2", "verify", PYTHON="false")
    assert first.returncode == 1
    assert first.stdout.startswith("verify: exit status 1 after ")
    assert run_script(tmp_path, "2", "verify", PYTHON="false").stdout == ""
    late = run_script(tmp_path, "1", "loop-proof", MINUTES="0")
    assert (late.returncode, late.stdout) == (1, "loop-proof: no time is left\n")
    assert not (tmp_path / "out" / "done" / "loop-proof").exists()
    assert run_script(tmp_path, "", "").returncode == 1, "it says how it is called"


@pytest.mark.slow
@pytest.mark.whole
def test_the_script_runs_every_part(tmp_path: Path) -> None:
    proof = run_script(
        tmp_path, "1", "kernels-proof,loop-proof,graphs-proof,draws-proof,steps-proof", TRITON_INTERPRET="1"
    )
    parts = "outputs-ort-cpu,graphs-ort-cpu,verify,steps-ort-cpu,bundle-0.8,bench-0.8"
    backend = run_script(tmp_path, "2", parts)
    out = tmp_path / "out"
    assert (proof.returncode, backend.returncode) == (0, 0), (out / "log.txt").read_text()
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows} <= {"ok", "info"}
    found = {row["what"]: row["found"] for row in rows}
    assert found["proof: greedy, 4 at a time, plain"].startswith("20 of 20 tokens")
    assert found["proof: verify, greedy"].startswith("10 of 10 outputs")
    assert found["proof: sampled, T=1, batch 2, K=4"].startswith("8 of 8 tokens")
    assert found["ort-cpu, int4: greedy, 4 prompts x 16 tokens"].startswith("64 of 64 tokens")
    verified = json.loads((out / "verify.json").read_text())
    assert {part["status"] for part in verified["parts"].values()} <= {"passed", "skipped"}
    runs = json.loads((out / "bench-0.8.json").read_text())["prompts"]
    once = [run for run in runs if run["num_speculative_tokens"] == 1]
    accepted, drafted = (sum(run[key] for run in once) for key in ("accepted", "drafted"))
    assert abs(accepted / drafted - 0.8) < 0.1, "the draft is right so often"
