"""Ctrl-C, and Ctrl-C again: one line, exit code 130, and nothing half-written left, whenever they come."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from specexport import atomic
from specexport_runtime.cli.errors import SuggestingGroup

Work = Callable[[], object]


def interrupt() -> None:
    """Ctrl-C, now; Python calls the handler before anything else is done."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    """A runner in the background hands down an ignored SIGINT; and no other test shall meet ours."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def build(output: Path, work: Work) -> int:
    """Write ``output`` as a build does, with ``work`` in the middle; the exit code."""

    @click.group(cls=SuggestingGroup)
    def cli() -> None:
        pass

    @cli.command()
    def go() -> None:
        with atomic.new_folder(output, replace=True) as folder:
            (folder / "half").write_text("written")
            work()

    try:
        with pytest.raises(SystemExit) as ended:
            cli(["go"])
    except KeyboardInterrupt:
        pytest.fail("an interrupt went through")
    return int(str(ended.value.code))


def test_an_interrupt_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path / "out", interrupt) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_more_of_them_do_not_break_off_the_removing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rmtree, removed = shutil.rmtree, []

    def slow_rmtree(path: Path, **options: bool) -> None:
        interrupt()
        rmtree(path, **options)
        interrupt()
        removed.append(path)

    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    assert build(tmp_path / "out", interrupt) == 130
    assert removed
    assert capsys.readouterr().err.split() == ["interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_more_of_them_do_not_break_off_what_others_clear_away(tmp_path: Path) -> None:
    cleared = []

    def work() -> None:
        try:
            interrupt()
        finally:
            for number in range(20):
                interrupt()
                cleared.append(number)

    assert build(tmp_path / "out", work) == 130
    assert cleared == list(range(20))


def test_one_while_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = click.echo

    def slow_echo(*args: object, **options: bool) -> None:
        interrupt()
        echo(*args, **options)

    monkeypatch.setattr(click, "echo", slow_echo)
    assert build(tmp_path / "out", interrupt) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_once_all_is_clear_another_one_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    assert build(tmp_path / "out", interrupt) == 130
    interrupt()
    assert left == [130]


def test_one_that_somebody_swallowed_is_not_the_last_one_heard(tmp_path: Path) -> None:
    heard = []

    def work() -> None:
        for number in range(3):
            try:
                interrupt()
            except KeyboardInterrupt:
                heard.append(number)
        interrupt()
        heard.append("not")

    assert build(tmp_path / "out", work) == 130
    assert heard == [0, 1, 2]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_one_in_the_middle_of_a_replacement_leaves_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "whole").write_text("old")
    rename, when = os.rename, {"before": 0, "between": 1, "after": 2}[moment]
    calls: list[int] = []

    def slow_rename(source: Path, destination: Path) -> None:
        if when == len(calls) == 0:
            interrupt()
        rename(source, destination)
        calls.append(len(calls))
        if when == len(calls):
            interrupt()

    monkeypatch.setattr(os, "rename", slow_rename)
    assert build(output, lambda: None) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in output.iterdir()] == (["half"] if moment == "after" else ["whole"])


def test_one_as_soon_as_the_temporary_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def slow_mkdir(self: Path, *args: int, **options: bool) -> None:
        mkdir(self, *args, **options)
        if ".tmp-" in self.name:
            interrupt()

    monkeypatch.setattr(Path, "mkdir", slow_mkdir)
    assert build(tmp_path / "out", lambda: pytest.fail("must not be entered")) == 130
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_one_stays_ignored_and_a_command_leaves_the_handler_as_it_was(tmp_path: Path) -> None:
    """As in a background job of a shell."""
    assert build(tmp_path / "out", lambda: None) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert build(tmp_path / "out", interrupt) == 0
    assert (tmp_path / "out" / "half").exists()


def test_a_process_that_still_waits_for_something_says_nothing_more() -> None:
    script = """
import atexit, os, signal, time
import click
from specexport_runtime.cli.errors import SuggestingGroup
signal.signal(signal.SIGINT, signal.default_int_handler)
cli = SuggestingGroup()
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
cli.add_command(click.Command("go", callback=interrupt))
atexit.register(interrupt)
cli(["go"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr.split()) == (130, "", ["interrupted"])
