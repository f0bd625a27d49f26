import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cases.imports import HEAVY, loaded_after

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "specexport_runtime"
COMPILER = ROOT / "specexport"

HEAVY |= {"llguidance", "matplotlib", "polygraphy", "scipy"}
SERVING = {"fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "prometheus_client", "opentelemetry", "ray"}
"""Of the extras `serve` and `ray`: only what serves may name them."""
# What the runtime may name at all. onnxruntime, google (protobuf, which it brings), tensorrt, cuda and llguidance only
# inside functions: the import test sees to it.
RUNTIME_MAY_IMPORT = {
    "specexport_runtime", "click", "jinja2", "numpy", "rich", "tokenizers",
    "onnxruntime", "google", "tensorrt", "tensorrt_rtx", "cuda", "llguidance",
}  # fmt: skip
SERVER = RUNTIME / "server"
MAY_IMPORT_SERVING = (SERVER, RUNTIME / "playground", RUNTIME / "ray_serve", RUNTIME / "metrics.py")
IMPORTED_WITHOUT_THE_EXTRA = {"specexport_runtime.server", "specexport_runtime.cli.serve"}
IMPORTED_WITHOUT_THE_EXTRA |= {"specexport_runtime.server.config", "specexport_runtime.async_engine"}


def modules_of(package: Path) -> list[str]:
    found = pkgutil.walk_packages([str(package)], prefix=f"{package.name}.")
    not_modules = (".__main__", "._operators")  # the second is a library that ONNX Runtime loads
    return [package.name, *(module.name for module in found if not module.name.endswith(not_modules))]


def imports_in(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a source file with its line, lazy ones and ``import_module("…")`` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if "." in module:
                yield node.lineno, module
            else:  # `from package import part`
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def test_every_runtime_module_imports_without_heavy_packages(record_property: Callable[[str, object], None]) -> None:
    names, _ = loaded_after("\n".join(f"import {name}" for name in modules_of(RUNTIME)))
    assert "specexport_runtime" in names
    assert not names & (HEAVY | {"specexport", "ray"})
    serving = [".".join(path.relative_to(RUNTIME.parent).with_suffix("").parts) for path in MAY_IMPORT_SERVING]
    modules = [name for name in modules_of(RUNTIME) if not name.startswith(tuple(serving))]
    modules += sorted(IMPORTED_WITHOUT_THE_EXTRA)
    names, seconds = loaded_after("\n".join(f"import {name}" for name in modules))
    assert not names & (HEAVY | SERVING | {"specexport"})
    record_property("measured: seconds to import every runtime module", f"{seconds:.2f}")


@pytest.mark.parametrize(
    "module", ["specexport", "specexport.cli", "specexport_runtime", "specexport_runtime.cli.command"]
)
def test_entry_points_import_without_heavy_packages(module, record_property):
    names, seconds = loaded_after(f"import {module}")
    assert not names & HEAVY
    record_property(f"measured: seconds to import {module}", f"{seconds:.2f}")


def test_runtime_sources_name_no_forbidden_package() -> None:
    allowed = RUNTIME_MAY_IMPORT | set(sys.stdlib_module_names)
    sources = sorted(RUNTIME.rglob("*.py"))
    assert sources
    for path in sources:
        serves = any(path.is_relative_to(place) for place in MAY_IMPORT_SERVING)
        for line, name in imports_in(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            assert name.split(".")[0] in (allowed | SERVING if serves else allowed), (
                f"{where} imports {name!r}, which the runtime must not"
            )


def test_the_scan_sees_lazy_and_indirect_imports(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import a.b\ndef f():\n    from c import d\n    import importlib\n    importlib.import_module('e.f')\n"
        "    __import__('g')\n    from . import h\n"
    )
    assert {name for _, name in imports_in(source)} == {"a.b", "c.d", "importlib", "e.f", "g", "."}


def test_the_runtime_offers_what_the_readme_promises() -> None:
    runtime = importlib.import_module("specexport_runtime")
    assert {"SpecEngine", "SamplingParams"} <= set(runtime.__all__) <= set(dir(runtime))
