"""A build that dies leaves nothing that is taken for a bundle, and the next build clears its remains away."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specexport.compile.pipeline import build_bundle
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import BundleError
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair

WAIT_S = 240


def start_build(pair: TinyPair, output: Path) -> "subprocess.Popen[str]":
    args = [str(pair.target), "-o", str(output), "--no-cache"]
    # A test runner started in the background hands down an ignored SIGINT; Ctrl-C must reach the build.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from specexport.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "build", *args]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_files(process: "subprocess.Popen[str]", folder: Path) -> Path:
    """Wait until the build has made its temporary folder and is past loading."""
    temporary = folder / f".out.tmp-{process.pid}"
    assert process.stderr is not None
    deadline = time.monotonic() + WAIT_S
    for line in process.stderr:
        if "trace" in line:
            break
        assert time.monotonic() < deadline
    assert temporary.is_dir(), "the build works somewhere else than expected"
    return temporary


@pytest.mark.whole
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_stopped_leaves_no_bundle(sent: signal.Signals, tiny_pair: TinyPair, tmp_path: Path) -> None:
    process = start_build(tiny_pair, tmp_path / "out")
    temporary = wait_for_files(process, tmp_path)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=WAIT_S)
    if sent == signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors.strip().endswith("interrupted")
        assert "Traceback" not in errors
    else:
        with pytest.raises(BundleError):
            load_manifest(temporary)
        build_bundle(tiny_pair.recipe(tmp_path / "out", draft=None))
        check_files(tmp_path / "out", load_manifest(tmp_path / "out").files)
        (tmp_path / "out").rename(tmp_path.with_name("built"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_cleared_away_and_a_running_one_is_not(
    tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path
) -> None:
    gone, running = (tmp_path / f".out.tmp-{pid}" for pid in (2**22 + 1, os.getppid()))  # no process has the first one
    for folder in (gone, running):
        folder.mkdir()
    build_bundle(tiny_pair.recipe(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"out", running.name}


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
