import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from specexport_runtime.executors.fake import FakeExecutor  # noqa: E402
from tools import gpu_check  # noqa: E402
from tools.gpu_check_lib import packages, registry, runner, timing  # noqa: E402
from tools.gpu_check_lib.context import Context, SkipTaskError, run_guarded  # noqa: E402
from tools.gpu_check_lib.forced import decode  # noqa: E402
from tools.gpu_check_lib.models import SIZES, make_tensors, next_token  # noqa: E402
from tools.gpu_check_lib.outputs import compare_texts  # noqa: E402
from tools.gpu_check_lib.rows import Recorder, Row, format_report, judge, read_rows, write_report  # noqa: E402
from tools.gpu_check_lib.rtx_probe import candidates  # noqa: E402
from tools.gpu_check_lib.runner import Budget, Task, run_tasks  # noqa: E402
from tools.gpu_check_lib.speed import LARGE, cells  # noqa: E402
from tools.gpu_check_lib.steps import compare_logits, compare_steps, random_tokens, time_step  # noqa: E402

VOCAB = 61


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(Recorder(tmp_path / "rows.jsonl", "section"), tmp_path, 60.0)


def rows_of(context: Context) -> list[Row]:
    return read_rows(context.recorder.path)


# budget and isolation


def test_budget_gives_a_task_its_limit_or_what_is_left_or_nothing() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    task = Task("a.b", "title", seconds=60, needs=20)
    assert budget.limit(task) == 60
    clock.now += 70
    assert budget.limit(task) == 30
    clock.now += 10
    assert budget.limit(task) == 20
    clock.now += 0.5
    assert budget.limit(task) is None


SCRIPTS = {
    "fine": "row('fine', 'found'); raise SystemExit(0)",
    "raises": "row('before', 'kept'); raise ValueError('the reason')",
    "crashes": "row('before the crash', 'kept'); import os; os.abort()",
    "hangs": "row('before the hang', 'kept'); import time; time.sleep(60)",
}
HEAD = """
import json, sys
def row(what, value):
    with open(sys.argv[1], 'a') as file:
        file.write(json.dumps(dict(section='s', what=what, value=value)) + '\\n')
"""


def run_scripts(tmp_path: Path, names: Sequence[str], seconds: float = 20.0, limit: float = 15.0) -> list[list[Row]]:
    """What was reported after each task."""
    reports: list[list[Row]] = []
    tasks = [Task(name, "s", 1.0 if name == "hangs" else limit, needs=0.5) for name in names]

    def command(task: Task, limit: float) -> list[str]:
        place = runner.rows_file(tmp_path, task)
        return [sys.executable, "-S", "-c", HEAD + SCRIPTS[task.name], str(place)]

    rows = run_tasks(
        tasks, Budget(seconds), tmp_path, tmp_path / "log.txt",
        command=command, environment=dict(os.environ), report=lambda found: reports.append(list(found)),
    )  # fmt: skip
    assert reports[-1] == rows
    return reports


def test_a_task_that_fails_costs_its_own_rows_only(tmp_path: Path) -> None:
    reports = run_scripts(tmp_path, ["raises", "crashes", "hangs", "fine"])
    assert [len(report) for report in reports] == [2, 4, 6, 7]  # the report is written after each task
    values = {row.what: (row.value, row.verdict) for row in reports[-1]}
    assert values["before"][0] == values["before the crash"][0] == values["before the hang"][0] == "kept"
    assert values["raises"][1] == values["crashes"][1] == values["hangs"][1] == "failed"
    assert "ValueError: the reason" in values["raises"][0]
    assert "SIGABRT" in values["crashes"][0]
    assert "ran past its 1 s" in values["hangs"][0]
    assert values["fine"] == ("found", "info")


def test_a_task_that_would_start_too_late_is_skipped(tmp_path: Path) -> None:
    rows = run_scripts(tmp_path, ["hangs", "fine"], seconds=1.3)[-1]
    assert [row.what for row in rows] == ["before the hang", "hangs", "fine"]
    assert rows[-1].verdict == "skipped"
    assert rows[-1].value.startswith("skipped: out of time")


def test_what_a_task_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    outcome = runner.run_process([sys.executable, "-S", "-c", script], tmp_path / "log", 1.5, dict(os.environ))
    assert outcome.status is None
    child = int(outcome.last_words)
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the task's child is alive")


def test_rows_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    first = run_scripts(tmp_path, ["fine"])[-1]
    assert run_scripts(tmp_path, ["fine"])[-1] == first


def test_a_program_that_is_not_there_is_a_row(tmp_path: Path) -> None:
    rows = run_tasks(
        [Task("a.b", "s", 5, 0)], Budget(9), tmp_path, tmp_path / "log.txt",
        command=lambda *_: [str(tmp_path / "nothing")], environment={}, report=lambda _: None,
    )  # fmt: skip
    assert [row.verdict for row in rows] == ["failed"]


def test_a_part_that_raises_is_a_row_and_the_others_go_on(context: Context) -> None:
    with context.part("first"):
        raise ZeroDivisionError("one | two\nlines")
    with context.part("second"):
        raise SkipTaskError("no such thing")
    with context.part("third"):
        context.recorder.row("third", "found")
    found = [(row.what, row.value, row.verdict) for row in rows_of(context)]
    assert found == [
        ("first", "failed: ZeroDivisionError: one / two lines", "failed"),
        ("second", "skipped: no such thing", "skipped"),
        ("third", "found", "info"),
    ]


def test_a_task_function_that_raises_is_a_row(context: Context) -> None:
    def broken(_: Context) -> None:
        raise RuntimeError("broken")

    run_guarded(context, "task", broken)
    assert [row.value for row in rows_of(context)] == ["failed: RuntimeError: broken"]


def test_parts_without_time_are_skipped(context: Context) -> None:
    assert context.has_time("now", 5)
    context.start -= 58
    assert not context.has_time("late", 5)
    assert [(row.what, row.verdict) for row in rows_of(context)] == [("late", "skipped")]


def test_a_backend_that_did_not_run_is_not_tried_again(context: Context) -> None:
    context.require_backend("ort-cuda")  # nobody has tried
    context.remember("backend-ort-cuda", {"runs": True, "reason": ""})
    context.require_backend("ort-cuda")
    context.remember("backend-ort-cuda", {"runs": False, "reason": "too old"})
    with pytest.raises(SkipTaskError, match="too old"):
        context.require_backend("ort-cuda")


# rows and tables


def test_report_has_a_table_a_section_and_details_last() -> None:
    rows = [
        Row("2. second", "b", "no", target="yes", verdict="missed"),
        Row("1. first", "a | x", "1.5 ms", verdict="ok"),
        Row("1. first", "deep", "fine", is_detail=True),
        Row("2. second", "c", "failed: so", verdict="failed"),
    ]
    text = format_report(rows, ["# Title"])
    assert text.index("# Title") < text.index("1 ok, 1 missed, 1 failed, 0 skipped")
    assert text.index("## 1. first") < text.index("## 2. second") < text.index("## details") < text.index("| deep |")
    assert "| a / x | 1.5 ms |  | ok |" in text
    assert "| b | no | yes | missed |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 5 for line in lines)


def test_report_files_hold_every_row(tmp_path: Path) -> None:
    rows = [Row("1. first", "a", "b", data={"number": np.float32(1.5)})]
    write_report(tmp_path, rows, ["# T"], {"time": "now"})
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["time"] == "now"
    assert record["rows"][0]["what"] == "a"
    assert float(record["rows"][0]["data"]["number"]) == 1.5
    assert "| a | b |" in (tmp_path / "results.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_a_row_that_was_cut_off_costs_itself_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rows.jsonl", "s")
    recorder.row("whole", "yes")
    with recorder.path.open("a") as file:
        file.write('{"section": "s", "what": "ha')
    assert [row.what for row in read_rows(recorder.path)] == ["whole"]


def test_targets() -> None:
    assert judge(0.8, at_least=0.8) == "ok"
    assert judge(0.79, at_least=0.8) == "missed"
    assert judge(101, at_most=100) == "missed"
    assert judge(100, at_most=100) == "ok"
    assert judge(float("nan"), at_most=1) == "missed"
    assert judge(float("nan")) == "missed"


# forced acceptance


def fakes(rows: int, **draft: Any) -> tuple[FakeExecutor, FakeExecutor]:
    return FakeExecutor(VOCAB, rows, 700), FakeExecutor(VOCAB, rows, 700, **draft)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_forced_acceptance_is_the_rate_asked_for(rate: float, rows: int) -> None:
    target, draft = fakes(rows, seed=99)  # a draft that knows nothing
    prompts = random_tokens(VOCAB, rows, 7)
    plain = decode(target, prompts, 600 // rows)
    assert plain.acceptance is None
    forced = decode(
        target, prompts, 600 // rows, draft=draft, lookahead=4, rate=rate, continuations=plain.outputs
    )  # fmt: skip
    assert forced.outputs == plain.outputs
    assert forced.departed == 0
    assert forced.acceptance is not None
    # Draws are independent: three standard deviations of their mean.
    margin = 3 * (rate * (1 - rate) / forced.tested) ** 0.5
    assert abs(forced.acceptance - rate) <= margin
    assert forced.tested >= 100
    expected_length = sum(rate**j for j in range(5))
    assert forced.tokens / forced.rounds / rows == pytest.approx(expected_length, rel=0.12)


def test_the_draft_model_is_paid_for() -> None:
    target, draft = fakes(1)
    prompts = random_tokens(VOCAB, 1, 5)
    plain = decode(target, prompts, 41)
    target.calls.clear()
    forced = decode(target, prompts, 41, draft=draft, lookahead=4, rate=1.0, continuations=plain.outputs)
    rounds = 40 // 5  # after the first token, all accepted
    assert len(target.calls) == 1 + rounds
    assert len(draft.calls) >= 4 * rounds
    assert forced.tokens == 40


def test_text_that_leaves_its_continuation_is_noticed_and_still_right() -> None:
    target, draft = fakes(2)
    prompts = random_tokens(VOCAB, 2, 5)
    plain = decode(target, prompts, 30)
    wrong = [list(plain.outputs[0]), list(plain.outputs[1])]
    wrong[1][10] = (wrong[1][10] + 1) % VOCAB
    forced = decode(target, prompts, 30, draft=draft, lookahead=3, rate=0.7, continuations=wrong)
    assert forced.outputs == plain.outputs
    assert forced.departed == 1


def test_only_rounds_of_the_full_batch_count() -> None:
    target, _ = fakes(2)
    done = decode(target, random_tokens(VOCAB, 2, 5), 20)
    assert done.rounds == 19
    assert done.tokens == 38
    assert 0 < done.host_seconds < done.seconds
    assert done.tokens_per_second == pytest.approx(38 / done.seconds)
    assert done.host_us == pytest.approx(1e6 * done.host_seconds / 19)


# steps and comparisons


def test_steps_of_equal_engines_are_equal_and_of_others_not() -> None:
    one, same = FakeExecutor(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120)
    other = FakeExecutor(VOCAB, 4, 120, noise=0.1)
    found = compare_steps(one, same)
    assert [item.largest for item in found] == [0.0] * len(found)
    assert all(item.rows == item.same_best for item in found)
    noisy = compare_steps(FakeExecutor(VOCAB, 4, 120), other)
    assert all(0 < item.largest < 1 for item in noisy)
    assert any(item.same_best < item.rows for item in noisy)


def test_steps_of_the_script_go_on_from_the_kept_tokens() -> None:
    class Watched(FakeExecutor):
        seen: list[list[int]] = []  # noqa: RUF012

        def execute(self, want: Any = "logits") -> Any:
            assert self._buffers is not None
            self.seen.append(self._buffers.kv_lens[:, 0].tolist())
            return super().execute(want)

    compare_steps(Watched(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120))
    assert Watched.seen == [[0, 0, 0, 0], [17, 5, 40, 1], [19, 6, 43, 6], [20, 9, 43, 7], [25, 10, 47, 9]]


def test_logits_that_are_no_numbers_miss_any_target() -> None:
    good = np.ones((2, 5), np.float32)
    bad = good.copy()
    bad[1, 3] = np.nan
    assert judge(compare_logits("x", good, bad).largest, at_most=1e9) == "missed"
    assert judge(compare_logits("x", good, good).largest, at_most=0) == "ok"


def test_gap_where_texts_part_is_the_references_own() -> None:
    reference = FakeExecutor(VOCAB, 1, 100)
    prompt = [3, 1, 4]
    ours = decode(reference, [prompt], 12).outputs[0]
    assert compare_texts(reference, prompt, ours, ours) == (12, 12, None)
    theirs = [*ours[:5], (ours[5] + 7) % VOCAB, *ours[6:]]
    found = compare_texts(reference, prompt, ours, theirs)
    logits = reference.logits_after([*prompt, *ours[:5]])
    assert found.equal == 5
    assert found.gap == pytest.approx(float(logits[ours[5]] - logits[theirs[5]]))
    assert found.gap > 0


def test_a_timed_step_is_the_same_step_each_time() -> None:
    from specexport_runtime.batch import ModelRunner

    executor = FakeExecutor(VOCAB, 2, 100)
    found = time_step(ModelRunner(executor), 2, 5, repeats=4, seconds=10)
    assert len(executor.calls) == 1 + 5 + 4
    assert len(set(executor.calls)) == 1
    assert executor.calls[0].num_tokens == executor.calls[0].num_logit_rows == 10
    assert 0 < found.engine_ms < found.total_ms


def test_measurements_that_matter_come_first() -> None:
    order = list(cells(LARGE))
    assert len(order) == len(set(order)) == len(LARGE.batches) * len(LARGE.lookaheads) * len(LARGE.rates)
    assert order[0] == (1, 4, 0.8)
    assert {k for _, k, _ in order[:8]} == set(range(1, 9))
    assert {batch for batch, _, _ in order[8:13]} == {2, 4, 8, 16, 32}


# bytes and rates


def test_bytes_of_a_step_are_those_of_its_entries() -> None:
    keys = np.zeros((8, 8, 4101, 128), np.float16)
    assert timing.kv_step_bytes(8, 8, 4101, 128, 2) == 2 * keys.nbytes
    assert round(timing.kv_step_bytes(8, 8, 4096, 128, 2) / 1e6) == 134  # as in docs/kernels.md
    assert round(timing.kv_step_bytes(8, 8, 16384, 128, 2) / 1e6) == 537


def test_rates_and_rotation() -> None:
    assert timing.gigabytes_per_second(4e9, 1000.0) == pytest.approx(4.0)
    assert timing.num_sets(10**9, 60 * 2**20) == 2
    assert timing.num_sets(2**20, 60 * 2**20) == 240


class FakeEvent:
    clock = Clock()

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize("can_record", [True, False])
def test_times_are_of_one_call(monkeypatch: pytest.MonkeyPatch, can_record: bool) -> None:
    import contextlib

    import torch

    ran = []

    def call() -> None:
        ran.append(1)
        FakeEvent.clock.now += 0.002

    calls = [call] * 4

    class Graph:
        def replay(self) -> None:
            for each in calls:
                each()

    def record(_: Graph) -> Any:
        if not can_record:
            raise RuntimeError("cannot be recorded")
        return contextlib.nullcontext()

    for name, value in {"synchronize": lambda: None, "Event": FakeEvent, "CUDAGraph": Graph, "graph": record}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    milliseconds, how = timing.time_rotating(calls, repeats=5, warm_up=1)
    assert milliseconds == pytest.approx(2.0)
    assert how == ("replayed from a graph" if can_record else "launched one by one (RuntimeError)")
    assert len(ran) == 4 * (1 + can_record + 1 + 5)


@pytest.mark.parametrize("ours_ms", [0.001, 0.004])
def test_the_kernels_table(monkeypatch: pytest.MonkeyPatch, context: Context, ours_ms: float) -> None:
    from types import SimpleNamespace

    import torch

    from specexport.kernels import launch
    from tools.gpu_check_lib import kernel_speed

    def attention(q: Any, k: Any, v: Any, kv_lens: Any, cu: Any, **options: Any) -> Any:
        return kernel_speed.expected(kernel_speed.case_of(64), q, k, v, options["scale"]).to(q.dtype)

    def measured(calls: Sequence[Any], **_: Any) -> tuple[float, str]:
        ours = "_call" in calls[0].__qualname__
        return (ours_ms, "a graph") if ours else (0.002, "a graph")

    gpu = SimpleNamespace(L2_cache_size=2**10, major=9, minor=0, multi_processor_count=132)
    make_inputs = kernel_speed.make_inputs
    for module, name, value in (
        (kernel_speed, "PASTS", (64,)),
        (kernel_speed, "NUM_SEQS", 2),
        (kernel_speed, "make_inputs", lambda case, dtype, _: make_inputs(case, dtype, "cpu")),
        (kernel_speed, "copy_bandwidth", lambda *_: 1000.0),
        (kernel_speed, "time_rotating", measured),
        (launch, "ragged_attention", attention),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: gpu),
    ):
        monkeypatch.setattr(module, name, value)
    kernel_speed.measure_kernels(context)
    rows = rows_of(context)
    assert "failed" not in {row.verdict for row in rows}, rows
    main, copy, best = (row for row in rows if not row.is_detail)
    num_bytes = 2 * 8 * 69 * 2 * 128 * 2
    assert main.data["kv_bytes"] == num_bytes
    assert main.data["gb_per_s"] == pytest.approx(num_bytes / ours_ms / 1e6)
    assert copy.verdict == ("missed" if num_bytes / ours_ms / 1e6 < 800 else "ok")
    assert best.data["ratio"] == pytest.approx(0.002 / ours_ms)
    assert best.verdict == ("ok" if ours_ms < 0.002 else "missed")
    ways = {row.what.rpartition("torch ")[2]: row for row in rows if row.is_detail and "torch" in row.what}
    assert ways["sdpa math, queries of a group stacked"].value == "2.0 us"
    assert any("not possible" in row.value for row in ways.values())


# models


def test_the_large_model_has_a_billion_parameters() -> None:
    assert 1.0e9 <= SIZES["large"].parameters <= 1.3e9
    tensors = dict(make_tensors(SIZES["tiny"], seed=1, decisive=False))
    assert sum(tensor.size for tensor in tensors.values()) == SIZES["tiny"].parameters
    assert all(np.isfinite(tensor).all() and tensor.std() > 0.01 for tensor in tensors.values() if tensor.ndim == 2)


def test_the_large_models_profiles_take_every_step() -> None:
    from specexport_runtime.abi import StepShape
    from specexport_runtime.profiles import choose_profile
    from tools.gpu_check_lib.bundles import large_profiles

    profiles = large_profiles("target")
    for batch in LARGE.batches:
        for new in (1, *(k + 1 for k in LARGE.lookaheads)):
            choose_profile(profiles, StepShape(0, batch, batch * new, new, batch * new))
    for batch, new in ((1, 1), (1, 5), (8, 5), (32, 1)):
        chosen = profiles[choose_profile(profiles, StepShape(0, batch, batch * new, new, batch * new))]
        assert (chosen.num_seqs, chosen.max_new_tokens, chosen.is_fixed) == (batch, new, True)
    draft = large_profiles("draft")
    for batch in LARGE.batches:
        assert draft[choose_profile(draft, StepShape(0, batch, 2 * batch, 2, batch))].is_fixed


def test_what_builds_are_patched_with_is_there() -> None:
    from specexport import gpu_build

    assert callable(gpu_build.plan_profiles)


def test_a_decisive_head_answers_with_the_next_token() -> None:
    vocab = SIZES["tiny"].vocab
    tensors = dict(make_tensors(SIZES["tiny"], seed=1, decisive=True))
    logits = tensors["model.embed_tokens.weight"].astype(np.float32) @ tensors["lm_head.weight"].astype(np.float32).T
    assert logits.argmax(axis=1).tolist() == [next_token(token, vocab) for token in range(vocab)]
    assert sorted(next_token(token, vocab) for token in range(vocab)) == list(range(vocab))


# wheels


def test_split_files_join_to_the_same_bytes(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(2_345)
    whole, pieces, joined = (tmp_path / name for name in ("whole", "pieces", "joined"))
    for folder in (whole, pieces, joined):
        folder.mkdir()
    for name, size in (("a.whl", 1_000), ("b.whl", 2_345)):
        (whole / name).write_bytes(content)
        found = packages.split_file(whole / name, pieces, piece_bytes=size)
        assert [piece.stat().st_size for piece in found] == ([1000, 1000, 345] if size == 1000 else [2345])
    (pieces / "c.whl").write_bytes(b"not split")
    assert [path.name for path in packages.join_pieces(pieces, joined)] == ["a.whl", "b.whl"]
    assert (joined / "a.whl").read_bytes() == (joined / "b.whl").read_bytes() == content


@pytest.mark.parametrize("damage", ["first", "middle", "last", "altered"])
def test_missing_and_altered_pieces_are_named(tmp_path: Path, damage: str) -> None:
    whole, target = tmp_path / "big.whl", tmp_path / "target"
    whole.write_bytes(bytes(range(250)))
    target.mkdir()
    folder = tmp_path / "pieces"
    folder.mkdir()
    pieces = packages.split_file(whole, folder, piece_bytes=100)
    if damage == "altered":
        pieces[1].write_bytes(bytes(100))
    else:
        pieces[{"first": 0, "middle": 1, "last": 2}[damage]].unlink()
    with pytest.raises(ValueError, match=r"big\.whl"):
        packages.join_pieces(folder, target)
    assert not list(target.iterdir())


def make_wheel(folder: Path, name: str, content: str, module: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(module, content)
        wheel.writestr(f"{name}-1.0.data/scripts/program", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_in_pieces_are_installed_and_a_broken_one_harms_no_other(tmp_path: Path) -> None:
    wheels, work = tmp_path / "wheels", tmp_path / "work"
    wheels.mkdir()
    big = make_wheel(tmp_path, "carriedbig", "VALUE = 42\n" + "#" * 3000, "carried/big.py")
    make_wheel(wheels, "carriedsmall", "VALUE = 43\n", "carriedsmall-1.0.data/purelib/carried/small.py")
    packages.split_file(big, wheels, piece_bytes=500)
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    site, problems = packages.install(wheels, work)
    assert "broken-1.0" in problems
    assert "carriedbig" not in problems
    environment = gpu_check.make_environment(work, site, interpret=False)
    done = subprocess.run(
        [sys.executable, "-c", "import carried.big, carried.small, specexport_runtime, specexport; "
         "print(carried.big.VALUE, carried.small.VALUE)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "42 43"
    assert not list(site.rglob("program"))
    assert packages.install(wheels, work) == (site, problems)  # what is there stays


def test_wheels_are_fetched_for_the_other_machine() -> None:
    command = packages.download_command(["some-package>=1"], Path("folder"))
    assert command[-1] == "some-package>=1"
    for words in (("--python-version", "3.12"), ("--platform", "manylinux_2_28_x86_64"), ("--abi", "abi3")):
        assert any(tuple(command[i : i + 2]) == words for i in range(len(command))), words
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command


# tasks and command line


def test_every_task_has_code() -> None:
    tasks = registry.list_tasks((*registry.GPU_BACKENDS, registry.CPU))
    assert {task.section for task in tasks} == set(registry.SECTIONS)
    for task in tasks:
        assert callable(registry.function_of(task.name)), task
        assert task.needs <= task.seconds
        assert task.seconds < 60 * gpu_check.MINUTES
    dry = registry.list_tasks((registry.CPU,))
    assert "outputs.ort-cpu" in {task.name for task in dry}
    for task in dry:
        assert callable(registry.function_of(task.name)), task


def test_only_chooses_sections_and_tasks() -> None:
    chosen = registry.list_tasks(registry.GPU_BACKENDS, ["graphs", "machine.info"])
    assert [task.name for task in chosen] == ["machine.info", *(f"graphs.{b}" for b in registry.GPU_BACKENDS)]
    with pytest.raises(ValueError, match="nonsense"):
        registry.list_tasks(registry.GPU_BACKENDS, ["nonsense"])


def test_without_a_gpu_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert gpu_check.main(["run", "--out", str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "libcuda.so.1" in captured.err
    assert not captured.out
    assert not (tmp_path / "out").exists()


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["run", "--only", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert gpu_check.main(["run", "--wheels", "/nothing/here"]) == 2
    assert "/nothing/here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    assert ended.value.code == 2


def test_list_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(title in listed for title in registry.SECTIONS.values())


def test_architectures_to_try() -> None:
    known = ["NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121"]
    assert candidates("89", known)[0] == "SM89"
    assert candidates("90", known) == ["CURRENT", "SM89", "SM86", "SM80", "SM120", "portable"]
    assert candidates("90", ["SM89"]) == ["SM89", "portable"]


@pytest.mark.parametrize(
    ("works", "found", "verdict"),
    [({"SM89", "SM120"}, "89", "ok"), ({"CURRENT"}, None, "missed"), (set(), None, "missed")],
)
def test_the_probe_writes_its_answer_down(
    monkeypatch: pytest.MonkeyPatch, context: Context, works: set[str], found: str | None, verdict: str
) -> None:
    from tools.gpu_check_lib import bundles, rtx_probe

    def attempt(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = command[-1]
        if name == "SM86":
            raise subprocess.TimeoutExpired(command, 1)
        if name in works:
            return subprocess.CompletedProcess(command, 0, "builds, loads", "")
        return subprocess.CompletedProcess(
            command, 1, "CheckFailedError: refused", "[TRT] [E] the cause\n[TRT] [E] more"
        )

    monkeypatch.setattr(bundles, "sm_of_gpu", lambda: "90")
    monkeypatch.setattr(rtx_probe.subprocess, "run", attempt)
    rtx_probe.probe(context)
    rows = {row.what: row for row in rows_of(context)}
    assert rows["does TensorRT-RTX run on sm90?"].verdict == verdict
    assert context.recall("rtx-sm") == found
    assert "it hung" in rows["TensorRT-RTX engine built for SM86"].value
    refused = rows["TensorRT-RTX engine built for portable"].value
    assert refused.startswith("does not run on sm90: CheckFailedError: refused; [TRT] [E] the cause")
    if found:
        assert bundles.choose_sm(context) == found


# attention in torch: what the kernels are measured against


def test_reference_attention_is_that_of_the_op() -> None:
    from specexport.ops.reference import unpadded_attention
    from tools.gpu_check_lib.kernels import Case, appended, expected, make_inputs

    for case in (
        Case(rows=((17, 5), (0, 3), (9, 1), (3, 0)), heads=4, kv_heads=2, head_size=16),
        Case(rows=((30, 4), (2, 5)), heads=4, kv_heads=1, head_size=16, window=9, softcap=2.0),
    ):
        inputs = make_inputs(case, "float16", "cpu")
        caches = {name: appended(case, inputs, name) for name in ("k", "v")}
        found = expected(case, inputs["q"], caches["k"], caches["v"], 0.25).numpy()
        used = len(found)
        arrays = {
            name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
            for name, tensor in inputs.items()
        }
        right, keys, _ = unpadded_attention(
            *(arrays[name][:used] for name in "qkv"), arrays["k_cache"], arrays["v_cache"], arrays["kv_lens"],
            arrays["cu_new_tokens"], None, num_heads=case.heads, kv_num_heads=case.kv_heads, scale=0.25,
            window=case.window, softcap=case.softcap,
        )  # fmt: skip
        np.testing.assert_allclose(found, right, atol=2e-5)
        np.testing.assert_array_equal(caches["k"].float().numpy(), keys)


def test_torch_attention_is_right_in_every_form() -> None:
    from tools.gpu_check_lib.kernels import Case, expected, make_inputs
    from tools.gpu_check_lib.torch_attention import ways

    case = Case(rows=((40, 5),) * 3, heads=8, kv_heads=2, head_size=16)
    inputs = {
        name: tensor.nan_to_num().float() if tensor.is_floating_point() else tensor
        for name, tensor in make_inputs(case, "float16", "cpu").items()
    }
    right = expected(case, inputs["q"], inputs["k_cache"], inputs["v_cache"], 16**-0.5)
    names = [name for name in ways() if "math" in name]
    assert len(names) == 3
    for name in names:
        output = ways()[name](inputs)()
        assert float((output - right).abs().max()) < 1e-5, name


# the whole, dry


@pytest.mark.slow
def test_dry_run_of_every_section(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "run", "--backend", "ort-cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(out), "--work", str(tmp_path / "work"), "--minutes", "5"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    rows = [Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    bad = [row for row in rows if row.verdict in {"failed", "missed"}]
    assert not bad, (bad, (out / "log.txt").read_text()[-2000:])
    assert done.returncode == 0, done.stderr
    assert "nothing about a GPU" in (out / "results.md").read_text()
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
    assert found["ort-cpu: steps, batch 1"].data["ratios"].keys() == {"1", "4"}
    assert any("largest error" in row.value for row in rows if row.what.startswith("kernels, float16"))


# the sections of GPU backends, on a fake GPU


class FakeMachine:
    """A machine whose drivers are fake GPUs of an architecture that no engine is for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "runtime"))
        import test_trt_bundle as made

        from specexport_runtime.bundle import load_bundle
        from specexport_runtime.executors import cuda_driver, trt_engine
        from tools.gpu_check_lib import bundles

        self.made, self.load_bundle = made, load_bundle
        self.folder = made.write_bundle(folder)
        self.gpus: list[Any] = []
        self.opened: list[str] = []
        monkeypatch.setattr(cuda_driver, "CudaDriver", self.make_gpu)
        monkeypatch.setattr(trt_engine, "load_engine", self.load)
        monkeypatch.setattr(bundles, "get_bundle", lambda *_: load_bundle(self.folder, max_num_seqs=made.ROWS))

    def make_gpu(self) -> Any:
        self.gpus.append(self.made.FakeGpu(sm="sm90"))
        return self.gpus[-1]

    def load(self, path: Path, file: Any, gpu_name: str) -> Any:
        role = path.parent.name
        self.opened.append(path.name)
        entry = self.load_bundle(path.parents[1]).manifest.models[role]
        model = self.made.make_target() if role == "target" else self.made.make_draft("good")
        return self.made.FakeEngine(self.gpus[-1], entry, model)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    return FakeMachine(monkeypatch, tmp_path / "bundle")


def test_sections_run_on_a_gpu_that_no_engine_is_for(machine: FakeMachine, context: Context) -> None:
    from tools.gpu_check_lib import graphs, outputs, speed
    from tools.gpu_check_lib.machine import backend_task

    context.tiny = True
    context.remember("rtx-sm", "120")  # what the probe found to run
    for check in (backend_task, outputs.task, graphs.task, speed.measure_task):
        check("tensorrt-rtx")(context)
    rows = rows_of(context)
    assert not [row for row in rows if row.verdict in {"failed", "missed", "skipped"}], rows
    assert set(machine.opened) == {"model.sm120.engine"}
    assert all(gpu.in_use == 0 for gpu in machine.gpus)
    found = {row.what: row for row in rows}
    assert found["tensorrt-rtx: logits of graph and eager"].value == "equal"
    assert found["tensorrt-rtx: greedy, 4 prompts x 16 tokens"].data["equal"] == 64
    speeds = [row.data for row in rows if "acceptance" in row.what]
    assert len(speeds) == 4
    assert all(row["departed"] == 0 and row["acceptance"] > 0.5 for row in speeds)


def test_graphs_are_compared_with_eager_steps(machine: FakeMachine, context: Context) -> None:
    from tools.gpu_check_lib import graphs

    context.tiny = True
    context.remember("rtx-sm", "89")
    graphs.task("tensorrt-rtx")(context)
    eager, replayed = (gpu.calls["launch"] for gpu in machine.gpus)
    assert eager == 0
    assert replayed > 20


def test_an_engine_that_cannot_be_loaded_is_a_row_and_is_remembered(machine: FakeMachine, context: Context) -> None:
    from tools.gpu_check_lib.machine import backend_task
    from tools.gpu_check_lib.speed import measure_task

    backend_task("tensorrt-rtx")(context)  # nobody has said that another architecture's engine runs here
    (row,) = rows_of(context)
    assert row.verdict == "failed"
    assert "sm90" in row.value
    run_guarded(context, "speed", measure_task("tensorrt-rtx"))
    assert rows_of(context)[-1].verdict == "skipped"
