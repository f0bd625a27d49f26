"""Opening an ONNX Runtime session on an NVIDIA GPU, or saying why there is none."""

import contextlib
import ctypes
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specexport_runtime.errors import (
    BundleError,
    IncompatibleError,
    MissingDependencyError,
    SpecexportError,
    make_install_hint,
)
from specexport_runtime.executors.external_data import read_session_model
from specexport_runtime.executors.gpu import OLDEST_DRIVER
from specexport_runtime.executors.ort_cuda_package import CUDA, explain_missing_code, make_reinstall_hint
from specexport_runtime.executors.ort_session import sessions

_WARNING, _FATAL = 2, 4  # severities of onnxruntime's log; it begins with the first
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def summarize_error(error: Exception) -> str:
    """What an error of onnxruntime says, on one line and without the place in its source."""
    text = " ".join(str(error).split())
    failure = re.search(r"CUDA failure \d+: [^;]*", text)
    return failure[0].strip() if failure else text.rpartition(") ")[2]


def import_onnxruntime(device_id: int) -> Any:
    """The onnxruntime module, if it has the CUDA provider and a GPU to run it on (else IncompatibleError)."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime-gpu is not installed.", make_install_hint("cuda")) from error
    if CUDA not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"the installed onnxruntime {onnxruntime.__version__} is the CPU package; `onnxruntime` and "
            "`onnxruntime-gpu` provide the same module, and the last one installed stays.",
            make_reinstall_hint(),
        )
    with contextlib.redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls()  # the CUDA libraries of the nvidia packages; it prints what it does not find
    onnxruntime.set_default_logger_severity(_FATAL)  # the error below says it
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.uint8, "cuda", device_id)
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        raise _make_no_gpu_error(device_id, _find_load_error(onnxruntime) or summarize_error(error)) from error
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
    if reason := explain_missing_code(onnxruntime.__version__, compute_capability(device_id)):
        raise IncompatibleError(f"{reason}.", "build the bundle with --backend tensorrt, or take another GPU.")
    return onnxruntime


def _find_load_error(onnxruntime: Any) -> str | None:
    """What the loader says of the CUDA provider, such as ``libcuda.so.1`` without a driver; None if it loads."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    libraries = [folder / f"libonnxruntime_providers_{name}.so" for name in ("shared", "cuda")]
    try:
        for library in filter(Path.exists, libraries):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return None


def _make_no_gpu_error(device_id: int, reason: str) -> IncompatibleError:
    """The error where not even a byte can be had on a GPU."""
    if "out of memory" in reason:
        return IncompatibleError(f"GPU {device_id} has no memory left: {reason}.", "end other programs on the GPU.")
    return IncompatibleError(
        f"no GPU {device_id} for this bundle: {reason}.",
        f"`specexport doctor` says what is missing: an NVIDIA GPU, its driver ({OLDEST_DRIVER} or newer) or a library. "
        "For CPUs, build with --backend ort-cpu.",
    )


def compute_capability(device_id: int) -> int:
    """Of a GPU, 90 for 9.0; 0 where the driver does not say."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), device_id)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    return 0 if failed else 10 * major.value + minor.value


def open_session(ort: Any, path: Path, device_id: int, stream: int, cuda_graphs: bool) -> Any:
    """A session on a stream of a GPU; with ``cuda_graphs``, runs with a ``gpu_graph_id`` are captured and replayed."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # a pattern is kept for each combination of sizes
    # use_tf32 is for float32 products only: logits heads and routers that keep them lose no digits.
    provider = {"device_id": str(device_id), "use_tf32": "0", "enable_cuda_graph": str(int(cuda_graphs))}
    provider["user_compute_stream"] = str(stream)
    provider["arena_extend_strategy"] = "kSameAsRequested"  # by default weights may take twice their memory
    try:
        model = read_session_model(path, options)
        session = ort.InferenceSession(model, options, providers=[(CUDA, provider), "CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        raise _make_session_error(path, error) from error
    sessions.add(session)
    if CUDA not in session.get_providers():
        raise IncompatibleError(f"{path}: ONNX Runtime fell back to the CPU.", "`specexport doctor` says why.")
    return session


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of onnxruntime says that the GPU's memory is full."""
    return re.search("out of memory|failed to allocate memory", f"{error}", re.IGNORECASE) is not None


def _make_session_error(path: Path, error: Exception) -> SpecexportError:
    """The error for an engine that gave no session: the GPU's fault, or the file's."""
    reason = summarize_error(error)
    if is_out_of_memory(error):
        return IncompatibleError(
            f"{path}: the weights do not fit into the GPU's free memory: {reason}.",
            "end other programs on the GPU, or build the bundle again with --quantize int4.",
        )
    if "no kernel image" in reason:
        return IncompatibleError(
            f"{path}: the installed onnxruntime-gpu has no code for this GPU: {reason}.",
            "`specexport doctor` says for which it has.",
        )
    return BundleError(
        f"{path}: ONNX Runtime cannot load this engine: {error}",
        "build it again with `specexport build --backend ort-cuda`.",
    )
