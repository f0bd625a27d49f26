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
from tests.support.models.pairs import TinyPair

pytestmark = pytest.mark.slow

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


@pytest.fixture
def leftover(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """What a build that got SIGKILL left."""
    process = start_build(tiny_pair, tmp_path / "out")
    temporary = wait_for_files(process, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    return temporary


def test_a_killed_build_is_cleared_away_by_the_next(leftover: Path, tiny_pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not out.exists()
    with pytest.raises(BundleError):
        load_manifest(leftover)
    build_bundle(tiny_pair.recipe(out, draft=None))
    check_files(out, load_manifest(out).files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.whole
def test_a_running_build_is_not_cleared_away(tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / f".out.tmp-{os.getppid()}").mkdir()
    build_bundle(tiny_pair.recipe(tmp_path / "out"))
    assert (tmp_path / f".out.tmp-{os.getppid()}").is_dir()


def test_ctrl_c_leaves_nothing(tiny_pair: TinyPair, tmp_path: Path) -> None:
    process = start_build(tiny_pair, tmp_path / "out")
    wait_for_files(process, tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("interrupted")
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
