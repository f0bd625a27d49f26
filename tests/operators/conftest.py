"""The library of operators, built if it is missing or of other sources."""

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(__file__).parents[2] / "runtime" / "operators" / "build.py"


def build_module() -> ModuleType:
    """``runtime/operators/build.py``."""
    spec = importlib.util.spec_from_file_location("operators_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_path() -> Path:
    """Where this platform's library is; it is built if need be."""
    build = build_module()
    path: Path = build.PACKAGE / f"_operators.{build.TARGETS[build.this_target()].suffix}"
    if path.exists():
        library = ctypes.CDLL(str(path))
        library.specexport_build.restype = ctypes.c_char_p
        if library.specexport_build().decode() == build.fingerprint():
            return path
        path.unlink()  # the old file may be mapped
    subprocess.run([sys.executable, str(BUILD)], check=True)
    return path


@pytest.fixture(scope="session")
def library() -> Path:
    """The built library."""
    return library_path()
