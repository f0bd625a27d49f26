"""The kernels that draw from logits: interpreted against the host's rule, and their PTX against their source."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from specexport.kernels.sampling_ptx import main, sampling_ptx
from specexport_runtime.executors.row_kernels import ARGUMENTS, ptx_path

pytestmark = pytest.mark.xdist_group("kernels-interpreted")

WORKER = Path(__file__).parents[1] / "support" / "references" / "sampling_worker.py"
WRITTEN_WITH = "3.9.0"
"""The Triton of the PTX; another writes other registers."""


def test_they_draw_as_the_host_does() -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), "distributions", "residuals", "twins"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_their_ptx_is_for_any_gpu_and_names_no_place_of_a_machine() -> None:
    for kernel in ARGUMENTS:
        ptx = ptx_path(kernel).read_text(encoding="utf-8")
        assert re.match(r"// threads \d+, shared \d+\n\.version 8\.7\n\.target sm_80\n", ptx), kernel
        assert not re.search(r"\.(file|loc)\b", ptx)
        assert ptx.count("/") == 2  # of the first line's comment
        parameters = re.search(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        assert parameters is not None
        assert parameters[1] == kernel
        assert len(parameters[2].split(",")) == len(ARGUMENTS[kernel])
        assert int(ptx.partition("\n")[0].split()[-1]) <= 48 << 10  # more would have to be asked for


@pytest.mark.slow
@pytest.mark.skipif(version("triton") != WRITTEN_WITH, reason="the PTX was written with another Triton")
def test_their_ptx_is_that_of_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in ARGUMENTS:
        assert sampling_ptx(kernel) == ptx_path(kernel).read_text(encoding="utf-8"), (
            f"{kernel}: run python -m specexport.kernels.sampling_ptx"
        )
    monkeypatch.setattr("specexport.kernels.sampling_ptx.ptx_path", lambda kernel: tmp_path / "new" / f"{kernel}.ptx")
    main()
    assert {path.stem for path in (tmp_path / "new").iterdir()} == set(ARGUMENTS)
