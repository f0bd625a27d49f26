"""What ``trt_engine`` calls, against the packages themselves: TensorRT's lean runtime, and TensorRT for RTX.

The full ``tensorrt`` lies on NVIDIA's own index only. Its lean runtime is an ordinary wheel with the same bindings, but
for the builder.
"""

import ast
import inspect
import re
import subprocess
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from specexport_runtime.executors import trt_engine
from tests.support.cases.present_gpu import has_gpu

LEAN, RTX = "tensorrt_lean_bindings", "tensorrt_rtx"
OWNERS = {
    "trt": "", "self._trt": "", "runtime": "Runtime", "engine": "ICudaEngine", "self._engine": "ICudaEngine",
    "context": "IExecutionContext", "self._context": "IExecutionContext", "config": "IRuntimeConfig",
    "self._cache": "IRuntimeCache",
}  # fmt: skip
"""The class of each expression in ``trt_engine`` that holds an object of the package; empty: the module."""


class Use(NamedTuple):
    owner: str  # class, or empty for the module
    names: tuple[str, ...]  # ("ILogger", "Severity", "ERROR")
    num_arguments: int | None  # of the call; None: it is read or set

    def __str__(self) -> str:
        return ".".join(filter(None, (self.owner, *self.names)))


def uses(*, of_rtx: bool) -> list[Use]:
    found: set[Use] = set()
    left_out = (
        {"list_mismatched_tensors"} if of_rtx else {"list_mismatched_tensors", "RtxKernels"}
    )  # the first takes an engine of ours
    kept = [x for x in ast.parse(inspect.getsource(trt_engine)).body if getattr(x, "name", None) not in left_out]
    nodes = [node for part in kept for node in ast.walk(part)]
    calls = {node.func: [*node.args, *node.keywords] for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        names: list[str] = []
        part: ast.AST = node
        while isinstance(part, ast.Attribute) and ast.unparse(part) not in OWNERS:
            names.insert(0, part.attr)
            part = part.value
        if names and ast.unparse(part) in OWNERS:
            given = calls.get(node)  # type: ignore[call-overload]
            counted = given is not None and not any(isinstance(x, ast.Starred) for x in given)
            found.add(Use(OWNERS[ast.unparse(part)], tuple(names), len(given) if counted else None))
    return sorted(found, key=str)


def counts(function: object) -> list[tuple[int, int]]:
    """Fewest and most arguments of each overload, by the signatures that pybind11 writes."""
    found = []
    for given in re.findall(r"\(self: [\w.]+(.*?)\) -> ", inspect.getdoc(function) or ""):
        parameters = re.findall(r", \w+: ((?:[^,\[]|\[[^\]]*\])*)", given)
        found.append((sum(" = " not in each for each in parameters), len(parameters)))
    return found


@pytest.fixture(params=[LEAN, RTX])
def package(request: pytest.FixtureRequest) -> ModuleType:
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed")


def test_every_name_is_in_the_package(package: ModuleType) -> None:
    wanted = uses(of_rtx=package.__name__ == RTX)
    assert {"Runtime", "ICudaEngine.device_memory_size_v2", "IExecutionContext.execute_async_v3"} <= set(
        map(str, wanted)
    )
    for use in wanted:
        found = getattr(package, use.owner) if use.owner else package
        for name in use.names:
            assert hasattr(found, name) or name == "__version__", f"{package.__name__} has no {use}"
            found = getattr(found, name)
        if use.num_arguments is not None and use.owner:
            overloads = counts(found)
            assert overloads, f"{use} has no signature"
            assert any(least <= use.num_arguments <= most for least, most in overloads), f"{use}: {overloads}"


LOAD = """
import sys
from pathlib import Path
sys.modules["tensorrt"] = package = __import__(sys.argv[1])
from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.trt_engine import load_engine
try:
    load_engine(Path(sys.argv[2]), EngineFile("model.sm89.engine", "sm89", "tensorrt", package.__version__), "L4")
except SpecexportError as error:
    print(type(error).__name__, error)
"""


def test_an_engine_that_is_none_is_refused_by_the_lean_runtime(tmp_path) -> None:
    """Without a GPU its runtime is null, and TensorRT would end the process that asks it for an engine."""
    lean = pytest.importorskip(LEAN, reason=f"{LEAN} is not installed")
    path = tmp_path / "model.sm89.engine"
    path.write_bytes(b"nonsense" * 100)
    done = subprocess.run([sys.executable, "-c", LOAD, LEAN, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "TensorRT's own log stays out of the way"
    assert f"{path}: tensorrt {lean.__version__} cannot load this engine of 800 bytes" in done.stdout
    fault = "BundleError" if has_gpu() else "IncompatibleError"
    assert done.stdout.startswith(fault), done.stdout
    assert ("specexport build --backend tensorrt --sm 89" if has_gpu() else "580 or newer") in done.stdout
