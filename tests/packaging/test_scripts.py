"""Scripts that no test runs: what they import from the packages is there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*/*.py")])
PACKAGES = ("specexport", "specexport_runtime")


def imported_names(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield node.module, [alias.name for alias in node.names]


def missing_names(source):
    for module, names in imported_names(source):
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                yield f"{module}.{name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_imports_what_is_there(script):
    assert list(missing_names(script.read_text(encoding="utf-8"))) == []


def test_a_name_that_is_gone_is_found():
    assert list(missing_names("from specexport_runtime import errors, gone")) == ["specexport_runtime.gone"]
