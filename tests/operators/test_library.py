"""The library of our operators: it loads, says what runs, and is named when it does not fit."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from specexport.doctor import command as doctor
from specexport_runtime.errors import IncompatibleError, MissingDependencyError, UserInputError
from specexport_runtime.executors import operators
from tests.support.cases import linear_cases
from tests.support.cases.memory import needs_linux, process_bytes


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has not asked for the library."""
    operators._load_library.cache_clear()
    yield monkeypatch
    operators._load_library.cache_clear()


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", f"from specexport_runtime.executors import operators\n{code}"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def negate() -> bytes:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "graph", value[:1], value[1:])
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("specexport", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


def test_sessions_take_it_once() -> None:
    options = onnxruntime.SessionOptions()
    operators.register(options)
    operators.register(options)  # ONNX Runtime would refuse the session
    for _ in range(2):
        session = onnxruntime.InferenceSession(negate(), options, providers=["CPUExecutionProvider"])
        assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]


def test_it_answers() -> None:
    assert operators.kernels() in operators.runnable_kernels()
    assert operators.runnable_kernels()[0] == "portable"
    operators.check_sources()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux what the processor has")
def test_it_finds_what_the_system_finds() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    asked = {
        "avx2": {"avx2", "fma", "f16c"},
        "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "avx512vnni": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"},
        "amx": {"avx512_vnni", "amx_tile", "amx_int8"},
        "neon_dot": {"asimddp"},
    }
    wanted = {name for name, needed in asked.items() if needed <= flags}
    assert set(operators.runnable_kernels()) == {"portable", *wanted}


def test_they_can_be_chosen() -> None:
    for name in {"portable", operators.runnable_kernels()[-1]}:
        assert run_python("print(operators.kernels())", SPECEXPORT_CPU_KERNELS=name) == name
    assert run_python("print(operators.kernels())", SPECEXPORT_CPU_KERNELS="") == operators.runnable_kernels()[-1]


@pytest.mark.parametrize(
    ("name", "says"),
    [("avx9", "no such instruction set"), (None, "this processor lacks it")],
    ids=["unknown", "absent"],
)
def test_what_cannot_run_is_refused(fresh: pytest.MonkeyPatch, name: str | None, says: str) -> None:
    if name is None:
        absent = {name for name, runs in operators._all_kernels(operators._load_library()) if not runs}
        name = sorted(absent)[0]
        operators._load_library.cache_clear()
    fresh.setenv("SPECEXPORT_CPU_KERNELS", name)
    with pytest.raises(UserInputError, match=rf"SPECEXPORT_CPU_KERNELS={name}: .*{says}.* runs portable") as refusal:
        operators.register(onnxruntime.SessionOptions())
    assert "\n" not in str(refusal.value)
    assert doctor._operators().state == "missing"


def test_the_library_itself_takes_the_best_instead() -> None:
    code = "import ctypes; print(operators._text(ctypes.CDLL(str(operators._LIBRARY)).specexport_kernels))"
    assert run_python(code, SPECEXPORT_CPU_KERNELS="avx9") == operators.runnable_kernels()[-1]


def test_a_missing_library_is_named(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(operators, "_LIBRARY", tmp_path / "none.so")
    with pytest.raises(MissingDependencyError, match=r"none\.so is missing.*make install"):
        operators.register(onnxruntime.SessionOptions())
    finding = doctor._operators()
    assert finding.state == "missing"
    assert "make install" in finding.fix
    fresh.setattr(operators, "_SOURCES", tmp_path)  # as in a wheel's installation
    with pytest.raises(MissingDependencyError, match="install specexport again"):
        operators.kernels()


@pytest.mark.parametrize("content", [b"", b"\x7fELF no"], ids=["empty", "broken"])
def test_a_broken_library_is_named(fresh: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(content)
    fresh.setattr(operators, "_LIBRARY", path)
    with pytest.raises(IncompatibleError, match=r"broken\.so cannot be loaded"):
        operators.kernels()


def test_a_stale_library_is_named(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "operators"
    shutil.copytree(operators._SOURCES, sources)
    fresh.setattr(operators, "_SOURCES", sources)
    for path in sources.iterdir():
        os.utime(path)
    assert operators.kernels(), "newer dates alone say nothing"
    operators._load_library.cache_clear()
    with (sources / "cpu.cpp").open("a") as file:
        file.write("// changed\n")
    with pytest.raises(IncompatibleError, match=rf"older than its sources in {re.escape(str(sources))}.*make install"):
        operators.register(onnxruntime.SessionOptions())
    for path in sources.iterdir():
        os.utime(path, (0, 0))
    assert operators.kernels(), "a session asks for the dates alone"
    assert "compiled from other sources" in doctor._operators().found


def test_an_onnxruntime_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.17.3")
    with pytest.raises(IncompatibleError, match=r"onnxruntime 1\.17\.3 is older than 1\.18"):
        operators.register(onnxruntime.SessionOptions())


def test_doctor_says_which_run() -> None:
    finding = doctor._operators()
    assert finding.topic == "CPU operators"
    assert finding.found.split()[0] == operators.kernels()
    assert all(name in finding.found for name in operators.runnable_kernels())


@needs_linux
def test_a_thread_that_ends_gives_its_memory_back(library: Path) -> None:
    """Of a user's thread, in which the parts of a step ran."""
    nodes, inputs = [linear_cases.linear("int8", 16, 4096)], {"x": (onnx.TensorProto.FLOAT, 2)}
    weight = linear_cases.packed("int8", 16, 4096, np.random.default_rng(1))
    session = linear_cases.session(str(library), nodes, inputs, {"w": weight}, ["y"], 1)
    x = np.ones((400, 4096), np.float32)  # 1.8 MB once they are arranged
    for count in (2, 20):
        before = process_bytes()
        for _ in range(count):
            thread = threading.Thread(target=session.run, args=(None, {"x": x}))
            thread.start()
            thread.join()
    assert process_bytes() - before < 8e6
