import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cases.patience import wait_until
from tools.gpu_check_lib import runner
from tools.gpu_check_lib.context import Context, SkipTaskError
from tools.gpu_check_lib.rows import Recorder, Row, read_rows
from tools.gpu_check_lib.runner import Budget, Task, run_tasks

VOCAB = 61


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows_of(context: Context) -> list[Row]:
    return read_rows(context.recorder.path)


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


def run_scripts(tmp_path: Path, names: Sequence[str], last: str = "", limit: float = 100.0) -> list[list[Row]]:
    """What was reported after each task; time is up behind the task ``last``."""
    reports: list[list[Row]] = []
    clock = Clock()
    tasks = [Task(name, "s", 1.0 if name == "hangs" else limit, needs=0.5) for name in names]

    def command(task: Task, limit: float) -> list[str]:
        place = runner.rows_file(tmp_path, task)
        return [sys.executable, "-S", "-c", HEAD + SCRIPTS[task.name], str(place)]

    def report(found: Sequence[Row]) -> None:
        reports.append(list(found))
        if found[-1].what == f"task {last}":
            clock.now += 1000

    rows = run_tasks(
        tasks, Budget(120.0, clock), tmp_path, tmp_path / "log.txt",
        command=command, environment=dict(os.environ), report=report,
    )  # fmt: skip
    assert reports[-1] == rows
    return reports


def test_a_task_that_fails_costs_its_own_rows_only(tmp_path: Path) -> None:
    reports = run_scripts(tmp_path, ["raises", "crashes", "hangs", "fine"])
    assert [len(report) for report in reports] == [3, 6, 9, 11]  # the report is written after each task
    ends = [row for row in reports[-1] if row.what.startswith("task ")]
    assert [row.data["finished"] for row in ends] == [True] * 4, "a second call would meet the same end"
    values = {row.what: (row.value, row.verdict) for row in reports[-1]}
    assert values["before"][0] == values["before the crash"][0] == values["before the hang"][0] == "kept"
    assert values["raises"][1] == values["crashes"][1] == values["hangs"][1] == "failed"
    assert "ValueError: the reason" in values["raises"][0]
    assert "SIGABRT" in values["crashes"][0]
    assert "ran past its 1 s" in values["hangs"][0]
    assert values["fine"] == ("found", "info")


def test_what_a_task_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    outcome = runner.run_process([sys.executable, "-S", "-c", script], tmp_path / "log", 1.5, dict(os.environ))
    assert outcome.status is None
    child = int(outcome.last_words)
    state = Path(f"/proc/{child}/stat")

    def gone() -> bool:
        try:
            return state.read_text().split()[2] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(gone)


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_scripts(tmp_path, ["fine", "hangs", "raises"], "hangs")[-1]
    assert [row.what for row in first] == ["fine", "task fine", "before the hang", "hangs", "task hangs", "raises"]
    assert first[-1].verdict == "skipped"
    assert "out of time" in first[-1].value
    capsys.readouterr()
    second = run_scripts(tmp_path, ["fine", "hangs", "raises", "crashes"])[-1]
    assert "fine: an earlier call has it" in capsys.readouterr().err
    assert second[: len(first) - 1] == first[:-1]
    assert [row.what for row in second[len(first) - 1 :] if row.verdict == "failed"] == ["raises", "crashes"]


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


def test_a_row_that_was_cut_off_costs_itself_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rows.jsonl", "s")
    recorder.row("whole", "yes")
    with recorder.path.open("a") as file:
        file.write('{"section": "s", "what": "ha')
    assert [row.what for row in read_rows(recorder.path)] == ["whole"]
