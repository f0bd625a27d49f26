"""The library of operators, built if it is missing or of other sources."""

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "runtime" / "operators" / "build.py"
PACKAGE = BUILD.parents[1] / "specexport_runtime"


def library_path() -> Path:
    """Where this platform's library is."""
    for path in PACKAGE.glob("_operators.*"):
        library = ctypes.CDLL(str(path))
        library.specexport_build.restype = ctypes.c_char_p
        if library.specexport_build().decode() == _fingerprint():
            return path
        path.unlink()  # it stays mapped here
    subprocess.run([sys.executable, str(BUILD)], check=True)
    return next(PACKAGE.glob("_operators.*"))


def _fingerprint() -> str:
    spec = importlib.util.spec_from_file_location("operators_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.fingerprint())


@pytest.fixture(scope="session")
def library() -> Path:
    """The built library."""
    return library_path()
