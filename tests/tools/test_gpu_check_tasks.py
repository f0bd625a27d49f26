import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import loop, trt_bundles, trt_fakes
from tools import gpu_check
from tools.gpu_check_lib import registry
from tools.gpu_check_lib.context import Context, run_guarded
from tools.gpu_check_lib.rows import Row, read_rows, write_report

ROOT = Path(__file__).parents[2]


def rows_of(context: Context) -> list[Row]:
    return read_rows(context.recorder.path)


def test_without_a_gpu_one_line_says_what_is_missing(monkeypatch, capsys, tmp_path):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert gpu_check.main(["run", "--out", str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    reason, *tasks = captured.err.splitlines()
    assert "libcuda.so.1" in reason
    assert tasks == [f"  {task.name}: no GPU, not run" for task in registry.list_tasks(registry.GPU_BACKENDS)]
    assert not captured.out
    assert not (tmp_path / "out").exists()


def test_results_of_other_settings_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"calls": [{"time": "t", "command": "c", "minutes": "1"}], "settings": {"tiny": True, "lowering": "auto"}}
    write_report(tmp_path, [], [], about)
    assert gpu_check.main(["run", "--out", str(tmp_path)]) == 2
    assert "take another --out" in capsys.readouterr().err
    options = gpu_check.parse(["run", "--tiny", "--out", str(tmp_path)])
    assert gpu_check.earlier_calls(tmp_path, gpu_check.settings_of(options)) == about["calls"]
    (tmp_path / "results.json").write_text("{}")
    assert gpu_check.main(["run", "--tiny", "--out", str(tmp_path)]) == 2
    assert "take another --out" in capsys.readouterr().err


def test_int4_engines_are_held_against_the_same_codes(context: Context) -> None:
    from tools.gpu_check_lib import outputs

    context.tiny = True
    outputs.check_int4(context, "ort-cpu")
    rows = rows_of(context)
    assert {row.verdict for row in rows} == {"ok"}
    assert any("greedy" in row.what and "ort-cpu, int4" in row.what for row in rows)


@pytest.mark.slow
@pytest.mark.whole
def test_dry_run_of_every_section(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "run", "--backend", "ort-cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(out), "--work", str(tmp_path / "work"), "--minutes", "60"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    rows = [Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    bad = [row for row in rows if row.verdict in {"failed", "missed"}]
    assert not bad, (bad, (out / "log.txt").read_text()[-2000:])
    assert done.returncode == 0, done.stderr
    found = {row.what: row for row in rows}
    assert found["ort-cpu: greedy, 4 prompts x 16 tokens"].data["equal"] == 64
    for name in ("prefill 17, 5, 40, 1", "verify 5, 1, 3, 5", "verify 1, 5, 0, 4", "decode 1, 1, 1, 1"):
        assert found[f"ort-cpu, float32: logits of {name}"].verdict == "ok"
    assert found["ort-cpu: logits of graph and eager"].verdict == "ok"
    forced = [row for row in rows if "acceptance 0.8" in row.what]
    assert len(forced) == 4
    for row in forced:
        assert row.data["departed"] == 0
        assert abs(row.data["acceptance"] - 0.8) < 0.25
        assert row.data["same_texts"] == (4 if "batch 4" in row.what else 1)
    for how in ("plain", "draft model, K=4"):
        text = found[f"proof: greedy, 4 at a time, {how}"]
        assert text.data["equal"] == text.data["total"] == 20
    assert len(found["proof: verify, greedy"].data["drafters"]) == 5
    assert found["proof: logits of graph and eager, 2 ragged steps"].value == "equal"


# the sections of GPU backends, on a fake GPU


class FakeMachine:
    """A machine whose drivers are fake GPUs, of an architecture that an engine is for unless a test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from specexport_runtime.bundle.opened import load_bundle
        from specexport_runtime.executors import cuda_driver, trt_engine
        from tools.gpu_check_lib import bundles

        self.load_bundle = load_bundle
        self.folder, self.sm = trt_bundles.write_bundle(folder), "sm120"
        self.gpus: list[Any] = []
        self.opened: list[str] = []
        monkeypatch.setattr(cuda_driver, "CudaDriver", self.make_gpu)
        monkeypatch.setattr(trt_engine, "load_engine", self.load)
        monkeypatch.setattr(bundles, "get_bundle", lambda *_: load_bundle(self.folder, max_num_seqs=trt_bundles.ROWS))

    def make_gpu(self) -> Any:
        self.gpus.append(trt_fakes.FakeGpu(sm=self.sm))
        return self.gpus[-1]

    def load(self, path: Path, file: Any, gpu_name: str) -> Any:
        role = path.parent.name
        self.opened.append(path.name)
        entry = self.load_bundle(path.parents[1]).manifest.models[role]
        model = loop.make_target() if role == "target" else loop.make_draft("good")
        return trt_fakes.FakeEngine(self.gpus[-1], entry, model)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    return FakeMachine(monkeypatch, tmp_path / "bundle")


def test_sections_run_over_tensorrts_executor(machine: FakeMachine, context: Context) -> None:
    from tools.gpu_check_lib import graphs, outputs, speed
    from tools.gpu_check_lib.machine import try_backend

    context.tiny = True
    for check in (try_backend, outputs.check_outputs, graphs.compare_graphs, speed.measure_speed):
        check(context, "tensorrt-rtx")
    rows = rows_of(context)
    assert not [row for row in rows if row.verdict in {"failed", "missed", "skipped"}], rows
    assert set(machine.opened) == {"model.sm120.engine"}
    assert all(gpu.in_use == 0 for gpu in machine.gpus)
    found = {row.what: row for row in rows}
    assert found["tensorrt-rtx: logits of graph and eager"].value == "equal"
    assert found["tensorrt-rtx: texts and accepted drafts of chains, batch 4"].value == "equal"
    assert found["tensorrt-rtx: greedy, 4 prompts x 16 tokens"].data["equal"] == 64
    speeds = [row.data for row in rows if "acceptance" in row.what]
    assert len(speeds) == 4
    assert all(row["departed"] == 0 and row["acceptance"] > 0.5 for row in speeds)


def test_an_engine_that_cannot_be_loaded_is_a_row_and_is_remembered(machine: FakeMachine, context: Context) -> None:
    from tools.gpu_check_lib.machine import try_backend
    from tools.gpu_check_lib.speed import measure_speed

    machine.sm = "sm90"
    try_backend(context, "tensorrt-rtx")
    (row,) = rows_of(context)
    assert row.verdict == "failed"
    assert "sm90" in row.value
    run_guarded(context, "speed", partial(measure_speed, backend="tensorrt-rtx"))
    assert rows_of(context)[-1].verdict == "skipped"
