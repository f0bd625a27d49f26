"""Cases of an operator, run in a process of their own with the kernels that a test names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def assert_cases_pass(
    library: Path, kernels: str, *more: str, module: str = "tests.support.cases.linear_cases"
) -> None:
    environment = os.environ | {"SPECEXPORT_CPU_KERNELS": kernels}
    code = f"import ctypes; l = ctypes.CDLL({str(library)!r}); l.specexport_kernels.restype = ctypes.c_char_p; "
    found = subprocess.run(
        [sys.executable, "-c", code + "print(l.specexport_kernels().decode())"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if found.stdout.strip() != kernels:
        pytest.skip(f"this processor does not run {kernels}")
    command = [sys.executable, "-m", module, str(library), *more]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
