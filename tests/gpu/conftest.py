"""What tests for a GPU share: rows of results, and the executors of every kind of engine.

``SPECEXPORT_GPU_OUT`` is the folder of the results, ``SPECEXPORT_GPU_WORK`` that of models and bundles, which stay.
``SPECEXPORT_GPU_KINDS`` chooses kinds of engines: ``proof,ort-cuda``. ``SPECEXPORT_GPU_TINY`` runs all with tiny models
on a CPU, and shows nothing but that the code runs.
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.open import open_executor
from tools.proof.bundles import build, large_profiles

TINY = bool(os.environ.get("SPECEXPORT_GPU_TINY"))
BACKENDS = ("ort-cpu",) if TINY else ("ort-cuda", "tensorrt-rtx", "tensorrt", "tensorrt-plugin")
CHOSEN = os.environ.get("SPECEXPORT_GPU_KINDS", ",".join(("proof", *BACKENDS))).split(",")
MODULES = {
    "proof": ("torch", "triton", *(() if TINY else ("cuda.bindings",))), "ort-cuda": ("onnxruntime",),
    "ort-cpu": ("onnxruntime",), "tensorrt-rtx": ("tensorrt_rtx", "cuda.bindings"),
    "tensorrt": ("tensorrt", "cuda.bindings"), "tensorrt-plugin": ("tensorrt", "cuda.bindings"),
}  # fmt: skip


def missing_gpu() -> str:
    """Why there is no GPU to run on; empty if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA GPU; libcuda.so.1 cannot be loaded"
    count = ctypes.c_int(0)
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return "" if not status and count.value else f"needs an NVIDIA GPU; the driver finds none (CUDA error {status})"


MISSING = "" if TINY else missing_gpu()


def pytest_runtest_setup() -> None:
    """All tests of this folder are skipped here, so that a report has the reason once."""
    if MISSING:
        pytest.skip(MISSING)


class Rows:
    """Rows of results, each written to the files of a folder as soon as it is known; None writes nothing.

    ``tell`` takes what the summary of all tests shows.
    """

    def __init__(self, folder: Path | None, *, tiny: bool, tell: Callable[[str, object], None] | None = None) -> None:
        self.folder, self.tiny, self._tell = folder, tiny, tell
        self.wrong: list[str] = []  # what has a right answer, and got another
        self.found: dict[str, tuple[str, str, dict[str, Any]]] = {}  # what was found, verdict and numbers of each row

    def row(self, what: str, found: str, target: str = "", verdict: str = "info", **data: Any) -> None:
        """A figure without a target; ``data`` are the numbers after it."""
        self.found[what] = found, verdict, data
        if self._tell is not None:
            self._tell(f"measured: {what}", f"{found} ({verdict})")
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "found": found, "verdict": verdict, **data}, default=str) + "\n")
        table, head = self.folder / "results.md", "| what | found | target | verdict |\n| --- | --- | --- | --- |\n"
        with table.open("a", encoding="utf-8") as file:
            file.write("" if file.tell() else head)
            file.write(f"| {what} | {found} | {target} | {verdict} |\n")

    def right(self, what: str, found: str, target: str, ok: bool, **data: Any) -> None:
        """What has a right answer."""
        if not ok:
            self.wrong.append(f"{what}: {found}, {target}")
        self.row(what, found, target, "ok" if ok else "wrong", **data)

    def reach(self, what: str, found: str, target: str, ok: bool, **data: Any) -> None:
        """A figure with a target, which means nothing of a tiny model; to miss it is no failure."""
        self.row(what, found, target, "info" if self.tiny else "ok" if ok else "missed", **data)


class Engines:
    """Opens the executors of one kind: over the proof engine, or of a backend's bundles; closes them in the end."""

    def __init__(self, kind: str, work: Path, *, tiny: bool) -> None:
        self.kind, self.work, self.tiny = kind, work, tiny
        self.most_rows = 4 if tiny or kind == "proof" else 8
        self._opened = ExitStack()

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def open(
        self, role: str = "target", *, size: str = "small", graphs: bool = True, num_rows: int = 4,
        quantize: str | None = None,
    ) -> Executor:  # fmt: skip
        """The executor of one model with so many cache rows; with ``graphs`` CUDA graphs are recorded."""
        size = "tiny" if self.tiny else size
        if self.kind == "proof":
            executor = self._open_proof(role, size, graphs, num_rows)
        else:
            folder = build(self.work, "large-0.8" if size == "large" else size, self.kind, quantize=quantize)
            bundle = load_bundle(folder, max_num_seqs=num_rows)
            recorded = None if self.kind == "ort-cpu" else graphs
            executor = open_executor(bundle, role, num_threads=None, spin=False, cuda_graphs=recorded)
        self._opened.callback(executor.close)
        return executor

    def _open_proof(self, role: str, size: str, graphs: bool, num_rows: int) -> Executor:
        from tools.proof.devices import HostGpu
        from tools.proof.models import ensure_engine, open_engine, profiles_of

        path = ensure_engine(self.work / "proof", size, role)
        if not self.tiny:
            profiles = large_profiles(role) if size == "large" else profiles_of(size, role)
            return open_engine(path, profiles, num_rows=num_rows, graphs=graphs)
        # Each profile runs once before it is recorded, and an interpreter takes a second for that.
        planned = profiles_of(size, role)
        profiles = tuple(each for each in planned if each.num_seqs == num_rows or not each.is_fixed)
        return open_engine(path, profiles, num_rows=num_rows, graphs=graphs, gpu=HostGpu())


def require(kind: str) -> None:
    """Skip what was not chosen, and what this machine has no packages or kernels for."""
    if kind not in CHOSEN:
        pytest.skip(f"{kind} is not chosen (SPECEXPORT_GPU_KINDS)")
    for name in MODULES[kind]:
        pytest.importorskip(name)
    if kind == "ort-cuda":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            pytest.skip(f"onnxruntime {onnxruntime.__version__} is here without the CUDA provider (onnxruntime-gpu)")
    if kind == "tensorrt-rtx":
        from specexport.backends.present_gpu import query_gpu_architecture
        from specexport.backends.trt_package import TENSORRT_RTX, known_architectures

        if (sm := query_gpu_architecture()) not in known_architectures(TENSORRT_RTX):
            pytest.skip(f"TensorRT-RTX has no kernels for sm {sm}")


@pytest.fixture
def rows(record_property: Callable[[str, object], None]) -> Rows:
    """Takes what is found."""
    folder = os.environ.get("SPECEXPORT_GPU_OUT")
    return Rows(Path(folder) if folder else None, tiny=TINY, tell=record_property)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and bundles are kept."""
    given = os.environ.get("SPECEXPORT_GPU_WORK")
    return Path(given) if given else tmp_path_factory.mktemp("gpu")


@pytest.fixture
def device() -> str:
    """Where torch and Triton run kernels."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not TINY and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    return "cpu" if TINY else "cuda"


def _opened(kind: str, work: Path) -> Iterator[Engines]:
    require(kind)
    with Engines(kind, work, tiny=TINY) as engines:
        yield engines


@pytest.fixture
def proof(work: Path) -> Iterator[Engines]:
    """Executors over the proof engine."""
    yield from _opened("proof", work)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, work: Path) -> Iterator[Engines]:
    """Executors of a backend."""
    yield from _opened(request.param, work)


@pytest.fixture(params=("proof", *BACKENDS))
def engines(request: pytest.FixtureRequest, work: Path) -> Iterator[Engines]:
    """Executors of every kind."""
    yield from _opened(request.param, work)
