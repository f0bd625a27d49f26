import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from tests.support.cases.patience import HANG_S

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
PACKAGES = {"specexport": ROOT / "specexport", "specexport_runtime": ROOT / "runtime" / "specexport_runtime"}
LIBRARY = {"darwin": "_operators.dylib", "win32": "_operators.dll"}.get(sys.platform, "_operators.so")
NOT_IN_PRODUCTION = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "triton", "safetensors", "gguf")


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, so that nothing is imported from its sources."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_"))}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def members(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def dist_info(members: Mapping[str, bytes], name: str) -> str:
    (path,) = (member for member in members if member.endswith(f".dist-info/{name}"))
    return members[path].decode()


def test_every_source_file_is_in_the_wheel_and_nothing_else(wheel: Path, members: Mapping[str, bytes]) -> None:
    wanted = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.stem != "_operators"
    }
    wanted |= {f"specexport_runtime/{LIBRARY}"}
    assert {name for name in members if ".dist-info/" not in name} == wanted
    assert {f"{name}/py.typed" for name in PACKAGES} <= wanted
    assert wheel.stat().st_size < 2_500_000
    assert "specexport = specexport.cli:main" in dist_info(members, "entry_points.txt").splitlines()


def test_wheel_is_for_every_python_of_one_platform(wheel: Path, members: Mapping[str, bytes]) -> None:
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    assert "Root-Is-Purelib: false" in dist_info(members, "WHEEL")


def test_licence_is_complete(members: Mapping[str, bytes]) -> None:
    text = dist_info(members, "licenses/LICENSE")
    assert text == (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_base_install_needs_no_compiler_package(members: Mapping[str, bytes]) -> None:
    lines = dist_info(members, "METADATA").splitlines()
    required = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    base = {item.name.replace("-", "_") for item in required if item.marker is None}
    assert base == {"click", "jinja2", "numpy", "rich", "tokenizers"}
    assert all(item.specifier for item in required), "every dependency has a tested range"


@pytest.fixture(scope="module")
def production(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executables folder of a fresh environment that holds the wheel with ``[cpu]`` and nothing else of ours."""
    folder = tmp_path_factory.mktemp("production")
    assert run([sys.executable, "-m", "venv", folder / "venv"], cwd=folder).returncode == 0
    bin_dir = folder / "venv" / "bin"
    installed = run([bin_dir / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cpu]"], cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return bin_dir


@pytest.mark.slow
@pytest.mark.xdist_group("production")  # one worker, one environment
def test_production_environment_generates_from_a_bundle(production: Path, demo_bundle: Path, tmp_path: Path) -> None:
    for package in NOT_IN_PRODUCTION:
        assert run([production / "python", "-c", f"import {package}"], cwd=tmp_path).returncode != 0, package
    command: list[str | Path] = [production / "python", "-m", "specexport_runtime", "generate", demo_bundle]
    command += ["def add(a, b):", "--max-tokens", "12", "--ignore-eos", "--json"]
    plain, speculative = run([*command, "--no-speculation"], cwd=tmp_path), run(command, cwd=tmp_path)
    assert speculative.returncode == 0, speculative.stderr
    answer, reference = json.loads(speculative.stdout), json.loads(plain.stdout)
    assert answer["token_ids"] == reference["token_ids"]
    assert answer["stats"]["num_generated_tokens"] == len(answer["token_ids"]) == 12
    assert answer["stats"]["drafted"] > 0
    assert reference["stats"]["drafted"] == 0


@pytest.mark.slow
@pytest.mark.xdist_group("production")  # one worker, one environment
def test_production_environment_names_the_missing_extra(production: Path, demo_pair: Path, tmp_path: Path) -> None:
    assert run([production / "specexport", "--help"], cwd=tmp_path).returncode == 0
    assert "ok      CPU operators" in run([production / "specexport", "doctor"], cwd=tmp_path).stdout
    result = run([production / "specexport", "build", demo_pair / "target", "-o", "bundle"], cwd=tmp_path)
    assert result.returncode == 2
    assert "pip install 'PATH[export,cpu]', PATH being specexport's clone or wheel." in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("production")  # one worker, one environment
def test_production_environment_serves_with_the_extra_and_asks_for_it_without(production, wheel, demo_bundle, tmp_path):
    command: list[str | Path] = [production / "specexport", "serve", demo_bundle, "--port", "0", "--no-adaptive"]
    without = run(command, cwd=tmp_path)
    assert without.returncode == 2
    assert "pip install 'PATH[serve]'" in without.stderr
    added = run([production / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cpu,serve]"], cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    for package in NOT_IN_PRODUCTION:
        assert run([production / "python", "-c", f"import {package}"], cwd=tmp_path).returncode != 0, package
    with subprocess.Popen([str(part) for part in command], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = next(line for line in server.stderr if "Serving " in line)
            url = said.split()[-1].rstrip(".")
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "def f(", "max_tokens": 4}, timeout=HANG_S)
            assert answer.status_code == 200, answer.text
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
