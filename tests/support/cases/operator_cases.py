"""Cases of an operator, run in a process of their own with the kernels that a test names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases.linear_cases import NOT_HERE

ROOT = Path(__file__).parents[3]


def assert_cases_pass(
    library: Path, kernels: str, *more: str, module: str = "tests.support.cases.linear_cases"
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, str(library), *more],
        env=os.environ | {"SPECEXPORT_CPU_KERNELS": kernels}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == NOT_HERE:
        pytest.skip(f"this processor does not run {kernels}")
    assert done.returncode == 0, done.stderr[-2000:]
