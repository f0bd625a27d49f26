"""Kernels and operators without ONNX Runtime: under the sanitizers, and on an emulated processor of another kind.

The driver itself compares the bits of all kernels that run, those of AMX over emulated tiles.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases.chance import many, seed

pytestmark = [pytest.mark.whole, pytest.mark.slow]
OPERATORS = Path(__file__).parents[2] / "runtime" / "operators"
INCLUDED = {"linear_portable.cpp", "linear_avx512.cpp"}  # by files here, which add kernels of emulated tiles
SOURCES = [
    *sorted(Path(__file__).parent.glob("*.cpp")),
    *(path for path in sorted(OPERATORS.glob("*.cpp")) if path.name not in INCLUDED),
]
FLAGS = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ['-DSPECEXPORT_BUILD="driver"']
DRAWS = 100_000


def run(program: Path, *before: str, kernels: str = "", draws: int = 0) -> set[str]:
    """Kernels that ran; with ``kernels``, those of the operators."""
    words = ["draws", str(draws), str(seed(37))] if draws else ["operators"] if kernels else []
    command = [*before, str(program), *words]
    limits = {"ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=64"} if draws else {}
    environment = os.environ | {"SPECEXPORT_CPU_KERNELS": kernels} | limits
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return set(done.stdout.split())


@pytest.mark.parametrize(("kinds", "level"), [("address,undefined", "-O0"), ("thread", "-O1")])
def test_sanitizers_find_nothing(kinds: str, level: str, tmp_path: Path) -> None:
    """Each at the level at which compiling and running take least together."""
    if not shutil.which("g++"):
        pytest.skip("no g++, whose sanitizers these are")
    program = tmp_path / "driver"
    sanitize = [level, "-g1", f"-fsanitize={kinds}", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *FLAGS, *sanitize, *SOURCES, "-o", program], check=True)
    ran = run(program)
    assert {"portable", "tiles_and_portable"} <= ran
    timed = subprocess.run([program, "time"], input="q4_k 5 near 2\n", capture_output=True, text=True, check=True)
    assert len(timed.stdout.split()) == 4, timed.stderr[-3000:]
    of_operators = ran & {"portable", "avx2", "avx512vnni", "amx"}
    for kernels in of_operators:
        assert kernels in run(program, kernels=kernels)
        if "address" in kinds:
            assert kernels in run(program, kernels=kernels, draws=many(DRAWS) // len(of_operators))


def test_aarch64_has_the_bits_of_this_processor(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("no qemu-aarch64: apt-get install qemu-user")
    zig = [sys.executable, "-m", "ziglang", "c++", "-nostdlib++", "-static", "-O2"]
    program, native = tmp_path / "driver", tmp_path / "native"
    subprocess.run([*zig, "-target", "aarch64-linux-musl", *FLAGS, *SOURCES, "-o", program], check=True)
    machine = platform.machine().replace("arm64", "aarch64")
    subprocess.run([*zig, "-target", f"{machine}-linux-musl", *FLAGS, *SOURCES, "-o", native], check=True)
    ran = run(program, emulator, "-cpu", "max")
    assert {"portable", "neon_dot"} <= ran
    digest = {word for word in ran if word.startswith("digest-")}
    assert len(digest) == 1
    assert digest <= run(native)
    for cpu, kernels in (("max", "neon_dot"), ("cortex-a53", "portable")):
        assert kernels in run(program, emulator, "-cpu", cpu, kernels=kernels)
