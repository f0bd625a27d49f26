"""Runs tasks one after another, each in a separate process with a time limit, inside one budget for all.

A separate process, because a GPU error poisons the process it happens in, and because native code may crash or hang.
Imports nothing heavy.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.gpu_check_lib.rows import OUT_OF_TIME, Recorder, Row, read_rows

GRACE_SECONDS = 3.0
"""How long a task may take to end once it was asked to."""


class Task(NamedTuple):
    """One isolated piece of work."""

    name: str  # unique, for example ``"outputs.ort-cuda"``; the part before the dot is its section
    title: str  # the section's heading
    seconds: float  # time limit
    needs: float  # seconds; it is not started with less time than this left

    @property
    def section(self) -> str:
        """What ``--only`` selects it by."""
        return self.name.partition(".")[0]


class Budget:
    """Time for all tasks together, in seconds of a monotonic clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left; may be negative."""
        return self._end - self._clock()

    def limit(self, task: Task) -> float | None:
        """Seconds that ``task`` may take now; None if it would start too late."""
        return None if self.left < task.needs else min(task.seconds, self.left)


class Outcome(NamedTuple):
    """How a task's process ended."""

    status: int | None  # exit status; negative for a signal; None if it ran out of time
    seconds: float  # how long it ran
    last_words: str  # last line of what it printed


def run_process(command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]) -> Outcome:
    """Run a command with its output appended to ``log``; end it and its children after ``limit`` seconds.

    ``environment`` is its whole environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("ab") as file:
        begin = file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=dict(environment), start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        except BaseException:
            _end(process)
            raise
        _end(process)
    seconds = time.monotonic() - start
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 4000))
        words = file.read().decode("utf-8", "replace").strip().splitlines()
    return Outcome(status, seconds, words[-1] if words else "")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its children (it leads their group): politely, then not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def describe(outcome: Outcome, limit: float) -> str:
    """Why a task is not whole; empty if it is."""
    if outcome.status == 0:
        return ""
    if outcome.status is None:
        return f"failed: it ran past its {limit:.0f} s and was ended; rows before this one are what it had found"
    if outcome.status < 0:
        name = signal.Signals(-outcome.status).name
        return f"failed: ended by {name}; last words: {outcome.last_words or 'none'}"
    return f"failed: exit status {outcome.status}; last words: {outcome.last_words or 'none'}"


def run_tasks(
    tasks: Sequence[Task],  # in order
    budget: Budget,
    folder: Path,  # where tasks write their rows, and where those of an earlier call are
    log: Path,  # what the tasks print
    *,
    command: Callable[[Task, float], Sequence[str]],  # of a task, given its time limit in seconds
    environment: Mapping[str, str],
    report: Callable[[Sequence[Row]], None],  # called with all rows so far after each task
) -> list[Row]:
    """Run every task for which there is time, and that an earlier call has not finished; returns all rows."""
    rows: list[Row] = []
    for task in tasks:
        place = rows_file(folder, task)
        earlier = read_rows(place)
        limit = budget.limit(task)
        if is_finished(earlier):
            print(f"{task.name}: an earlier call has it", file=sys.stderr, flush=True)
        elif limit is not None:
            place.unlink(missing_ok=True)
            _run_task(task, limit, Recorder(place, task.title), command(task, limit), log, environment)
        elif not any(row.verdict != "skipped" for row in earlier):  # what a killed call had found stays
            place.unlink(missing_ok=True)
            words = f"skipped: {OUT_OF_TIME} ({max(budget.left, 0.0):.0f} s left, it needs {task.needs:.0f})"
            Recorder(place, task.title).row(task.name, words, verdict="skipped")
        rows += read_rows(place)
        report(rows)
    return rows


def is_finished(rows: Sequence[Row]) -> bool:
    """Whether a task with these rows need not run again: it was not cut short by its call, and did not skip everything.

    A task that failed, or ran past its own limit, is finished: it would do so again.
    """
    return any(row.data.get("finished") for row in rows) and any(
        row.verdict != "skipped" and "finished" not in row.data for row in rows
    )


def _run_task(
    task: Task, limit: float, recorder: Recorder, command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> None:
    """Run one task; how it ended is a row if it did not end well."""
    print(f"{task.name} (at most {limit:.0f} s)", file=sys.stderr, flush=True)
    try:
        outcome = run_process(command, log, limit, environment)
    except OSError as error:
        recorder.fail(task.name, error)
        return
    if problem := describe(outcome, limit):
        recorder.row(task.name, problem, verdict="failed", seconds=outcome.seconds)
    was_cut = outcome.status is None or any(OUT_OF_TIME in row.value for row in read_rows(recorder.path))
    recorder.row(
        f"task {task.name}", f"{outcome.seconds:.1f} s; at most {limit:.0f} s", is_detail=True,
        seconds=outcome.seconds, limit=limit, finished=limit >= task.seconds or not was_cut,
    )  # fmt: skip
    print(f"  {outcome.seconds:.1f} s", file=sys.stderr, flush=True)


def rows_file(folder: Path, task: Task) -> Path:
    """Where a task writes its rows."""
    return folder / "rows" / f"{task.name}.jsonl"
