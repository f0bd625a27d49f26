"""The kernels without ONNX Runtime: under the sanitizers, and on an emulated processor of another kind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPERATORS = Path(__file__).parents[2] / "runtime" / "operators"
SOURCES = [Path(__file__).with_name("driver.cpp"), OPERATORS / "cpu.cpp", *sorted(OPERATORS.glob("linear_*.cpp"))]
FLAGS = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]


def run(program: Path, *before: str) -> str:
    done = subprocess.run([*before, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.whole
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++, whose sanitizers these are")
    program = tmp_path / "driver"
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *FLAGS, *sanitize, *SOURCES, "-o", program], check=True)
    assert "portable" in run(program)


@pytest.mark.whole
@pytest.mark.parametrize(("cpu", "kernels"), [("max", "neon_dot"), ("cortex-a53", "portable")])
def test_aarch64(tmp_path: Path, cpu: str, kernels: str) -> None:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("no qemu-aarch64: apt-get install qemu-user")
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-nostdlib++", "-static", "-O2"]
    program = tmp_path / "driver"
    subprocess.run([*zig, *FLAGS, *SOURCES, "-o", program], check=True)
    assert kernels in run(program, emulator, "-cpu", cpu).split()
