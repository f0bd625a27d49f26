import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from specexport_runtime import errors
from tests.support.cases.loaded import load_file

ROOT = Path(__file__).parents[2]
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.11"}
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "python_version": "3.13"}
CUDA_REQUIRES = [
    "filelock", "sympy>=1.13.3", 'cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux" and platform_machine == "x86_64"',
    'triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"', 'nvidia-extra; extra == "other"',
]  # fmt: skip


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return load_file(ROOT / "tools" / "install.py")


@pytest.mark.parametrize(
    ("version", "requires", "environment", "torch_cuda", "cpu_index"),
    [
        pytest.param("2.13.0", CUDA_REQUIRES, LINUX, False, True, id="cuda-wheel"),
        pytest.param("2.13.0", CUDA_REQUIRES, LINUX, True, False, id="asked-for"),
        pytest.param("2.13.0", CUDA_REQUIRES, MAC, False, False, id="mac"),
        pytest.param("2.13.0+cpu", CUDA_REQUIRES, LINUX, False, False, id="cpu-wheel"),
        pytest.param("2.13.0", ["filelock", "sympy"], LINUX, False, False, id="no-cuda"),
    ],
)
def test_a_cuda_wheel_that_nobody_asked_for_takes_the_cpu_index(
    install: ModuleType, version: str, requires: list[str], environment: dict[str, str], torch_cuda: bool,
    cpu_index: bool,
) -> None:  # fmt: skip
    metadata = {"name": "torch", "version": version, "requires_dist": requires}
    report = {"version": "1", "install": [{"metadata": metadata}], "environment": environment}
    assert install.decide(report, torch_cuda=torch_cuda).use_cpu_index is cpu_index
    assert not install.decide({}).use_cpu_index, "left to pip"


@pytest.mark.parametrize(
    ("extras", "installed", "removed"),
    [
        pytest.param("export,cuda", ["onnxruntime"], ["onnxruntime"], id="cpu-to-gpu"),
        pytest.param("export,cpu", ["onnxruntime-gpu"], ["onnxruntime-gpu"], id="gpu-to-cpu"),
        pytest.param("cuda", ["onnxruntime", "onnxruntime-gpu"], ["onnxruntime-gpu", "onnxruntime"], id="both"),
        pytest.param("export,cuda", ["onnxruntime-gpu"], [], id="right-one"),
        pytest.param("export,cpu", [], [], id="none"),
        pytest.param("serve", ["onnxruntime", "onnxruntime-gpu"], [], id="not-asked-for"),
    ],
)
def test_the_other_onnx_runtime_is_removed_with_the_files_that_both_share(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, extras: str, installed: list[str], removed: list[str]
) -> None:
    monkeypatch.setattr(install, "installed_version", lambda name: "1.31.1" if name in installed else None)
    assert install.clashing(extras.split(",")) == removed
    with pytest.raises(ValueError, match="exclude each other"):
        install.clashing(["cpu", "serve", "cuda"])


def test_hints_install_from_where_the_package_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clone has its command; a copy in site-packages may be of a clone or of a wheel."""
    assert errors.make_install_hint("cpu", "serve") == "pip install -e '.[cpu,serve]' in the clone of specexport."
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "specexport_runtime" / "errors.py"))
    assert errors.make_install_hint("cuda") == "pip install 'PATH[cuda]', PATH being specexport's clone or wheel."
    said = [errors.describe_not_installed(names) for names in (["torch"], ["torch", "onnx"])]
    assert said == ["torch, which is not installed", "torch, onnx, which are not installed"]


def test_pinned_torch_lies_in_the_declared_range(install: ModuleType) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = next(r for r in map(Requirement, extras["export"]) if r.name == "torch")
    pinned = next(iter(Requirement(install.TORCH).specifier)).version
    assert declared.specifier.contains(pinned)


def test_an_old_python_is_told_so_first(install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source = (ROOT / "tools" / "install.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    monkeypatch.setattr(install, "OLDEST", (3, 99))
    monkeypatch.setattr(sys, "argv", ["install.py", "cpu"])
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(SystemExit) as ended:
        install.main()
    assert ended.value.code == 2
    assert "specexport needs Python 3.99 or newer, and this is 3." in capsys.readouterr().err
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["requires-python"] == ">=3.11"
    assert "OLDEST = (3, 11)\n" in (ROOT / "hatch_build.py").read_text()
    assert "OLDEST = (3, 11)\n" in source
    zig = next(r for r in map(Requirement, pyproject["build-system"]["requires"]) if r.name == "ziglang")
    assert zig.marker is not None
    assert [zig.marker.evaluate({**LINUX, "python_version": version}) for version in ("3.10", "3.11")] == [False, True]


def test_refuses_to_install_outside_a_virtual_environment() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys; sys.prefix = sys.base_prefix; sys.argv = ['install.py', 'cpu']; "
         "import runpy; runpy.run_path('tools/install.py', run_name='__main__')"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "virtual environment" in result.stderr
