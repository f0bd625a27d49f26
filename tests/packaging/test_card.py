"""The commands for a person with an NVIDIA card, tried here up to the missing GPU: each ends in a line that says so.

The demo pair stands for the real one. What is installed is left alone: here onnxruntime is the package for CPUs, whose
message is as good an end.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/gpu.md")
RECIPE = ROOT / "engines" / "recipes" / "qwen-coder-cuda.toml"
MISSING = re.compile(
    r"error: (no GPU 0 for this bundle: .+|the installed onnxruntime .+ is the CPU package; .+) Fix: \S.+\.\n?"
)
pytestmark = pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine may have a GPU")


def commands(page: str) -> list[str]:
    """Of the page's block for a card, without comments."""
    blocks = re.findall(
        r"^```bash no-test: [^\n]*test_card\.py[^\n]*\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M
    )
    assert len(blocks) == 1, page
    return [part.strip() for line in blocks[0].splitlines() for part in line.partition("  #")[0].split("&&")]


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    words = map(str, command)
    return subprocess.run([*words], cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def specexport(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", "from specexport.cli import main; main()", *arguments)


def test_what_installs_would_take_the_package_for_gpus() -> None:
    (install,) = (command for command in commands("docs/gpu.md") if "install.py" in command)
    done = run(sys.executable, *shlex.split(install)[1:], "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "removing onnxruntime, which" in done.stdout


@pytest.mark.slow
@pytest.mark.whole
def test_a_bundle_is_built_and_then_says_what_is_missing(tmp_path: Path, demo_pair: Path) -> None:
    bundle = tmp_path / RECIPE.stem
    pair = (demo_pair / "target", "--draft", demo_pair / "draft", "--max-model-len", "512")
    built = specexport("build", *pair, "--recipe", RECIPE, "-o", bundle)
    assert built.returncode == 0, built.stderr
    assert "there is none here" in built.stdout + built.stderr
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert {model["dtype"] for model in manifest["models"].values()} == {tomllib.loads(RECIPE.read_text())["dtype"]}
    for command in {command for page in PAGES for command in commands(page)}:
        if not re.match(r"specexport (generate|serve) ", command):
            continue
        words = [str(bundle) if word == f"engines/{RECIPE.stem}" else word for word in shlex.split(command)[1:]]
        assert str(bundle) in words
        done = specexport(*(word for word in words if word != "--chat"), *(["--port", "0"] if "serve" in words else []))
        assert done.returncode in (2, 3), done.stderr
        assert MISSING.fullmatch(done.stderr.splitlines()[-1]), done.stderr
        assert "Traceback" not in done.stderr
