"""Ctrl-C, again, SIGTERM, SIGHUP and a kill: one line, its code, and nothing half-written is left."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from specexport import atomic
from specexport.compile.pipeline import build_bundle
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.cli.errors import SuggestingGroup
from specexport_runtime.errors import BundleError
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair

Work = Callable[[], object]


ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


def interrupt(sent: signal.Signals = signal.SIGINT) -> None:
    """Ctrl-C, now; Python calls the handler before anything else is done."""
    os.kill(os.getpid(), sent)
    for _ in range(1000):
        pass


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    """A runner in the background hands down an ignored SIGINT; and no other test shall meet ours."""
    before = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [((None, ""), 0, 0), ((shutil, "rmtree"), 1, 1), ((click, "echo"), 1, 0), ((Path, "mkdir"), 0, 1)],
    ids=["work", "while its folder is removed", "while it is said", "as soon as its folder is there"],
)
def test_interrupts_are_one_line_and_leave_nothing(
    place: Any, before: bool, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    owner, name = place
    own, called = getattr(owner, name, None), []

    def interrupted(*args: Any, **options: Any) -> None:
        called.append(args)
        if before:
            interrupt()
        own(*args, **options)  # type: ignore[misc]
        if after and (owner is not Path or ".tmp-" in args[0].name):
            interrupt()

    if owner is not None:
        monkeypatch.setattr(owner, name, interrupted)
    assert build(tmp_path / "out", (lambda: pytest.fail("must not be entered")) if owner is Path else interrupt) == 130
    assert bool(called) == (owner is not None)
    assert capsys.readouterr().err.split() == ["interrupted"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "said"), ENDS.items())
def test_whatever_asks_a_command_to_end_is_said_and_leaves_nothing(
    sent: signal.Signals, said: str, tmp_path: Path, capsys: Any
) -> None:
    assert build(tmp_path / "out", lambda: interrupt(sent)) == 128 + sent
    assert capsys.readouterr().err.strip() == said
    assert list(tmp_path.iterdir()) == []


def test_more_of_them_do_not_break_off_what_others_clear_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []

    def work() -> None:
        try:
            interrupt()
        finally:
            for number in range(20):
                interrupt()
                cleared.append(number)

    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    assert build(tmp_path / "out", work) == 130
    assert (cleared, left) == (list(range(20)), [])
    interrupt()
    assert left == [130], "once all is clear another one ends the process"


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


WAIT_S = 240


@pytest.mark.whole
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_stopped_leaves_no_bundle(sent: signal.Signals, tiny_pair: TinyPair, tmp_path: Path) -> None:
    # A test runner started in the background hands down an ignored SIGINT; Ctrl-C must reach the build.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from specexport.cli import main; main()"
    command = [sys.executable, "-c", code, "build", tiny_pair.target, "-o", tmp_path / "out", "--no-cache"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("trace" in line for line in process.stderr), "it is past loading"
    (temporary,) = tmp_path.glob(".out.tmp-*")
    process.send_signal(sent)
    _, errors = process.communicate(timeout=WAIT_S)
    if sent == signal.SIGTERM:
        assert process.returncode == 143, errors
        assert errors.strip().endswith("terminated")
        assert "Traceback" not in errors
    else:
        with pytest.raises(BundleError):
            load_manifest(temporary)
        build_bundle(tiny_pair.recipe(tmp_path / "out", draft=None))
        check_files(tmp_path / "out", load_manifest(tmp_path / "out").files)
        (tmp_path / "out").rename(tmp_path.with_name("built"))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_a_build_leaves_nothing(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr("specexport.compile.part.compile_graph", interrupted)
    ended = run_cli("build", tiny_pair.target, "-o", tmp_path / "out", "--no-cache", "-q")
    assert (ended.exit_code, ended.stderr.split()) == (130, ["interrupted"])
    assert list(tmp_path.iterdir()) == []
