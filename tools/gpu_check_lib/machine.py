"""Section 1: the machine, and which backends run on it, each tried for real."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from specexport_runtime.errors import SpecexportError
from tools.gpu_check_lib.context import Context, SkipTaskError
from tools.gpu_check_lib.needs import require_modules
from tools.gpu_check_lib.rows import reason_of

PACKAGES = (
    "torch", "triton", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs", "tensorrt", "cuda-bindings", "numpy",
    "tokenizers", "safetensors",
)  # fmt: skip
NEW_TOKENS = 8


def info(context: Context) -> None:
    """GPU, driver, processor and package versions."""
    row = context.recorder.row
    with context.part("GPU"):
        row("GPU", gpu_line())
    with context.part("CUDA runtime"):
        from specexport_runtime.executors.cuda_driver import CudaDriver

        try:
            driver = CudaDriver()
        except SpecexportError as error:
            if context.tiny:  # a dry run needs no GPU
                raise SkipTaskError(str(error)) from error
            raise
        gpu = driver.info()
        driver.close()
        row("cuda-python sees", f"{gpu.name}, {gpu.sm}, {gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB",
            sm=gpu.sm, total_bytes=gpu.total_bytes)  # fmt: skip
    row("machine", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    row("packages", ", ".join(f"{name} {value}" for name, value in versions().items()), packages=versions())


def gpu_line() -> str:
    """What nvidia-smi says of the first GPU; SkipTaskError if there is no nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise SkipTaskError("nvidia-smi is not on the PATH")
    names = "name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem"
    command = [tool, f"--query-gpu={names}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return f"{done.stdout.strip().splitlines()[0]} ({names})"


def versions() -> dict[str, str]:
    """Installed versions of what results depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def try_backend(context: Context, backend: str) -> None:
    """Build a small random Llama for a backend, load it, generate a few tokens; remember whether that worked."""
    context.remember(f"backend-{backend}", {"runs": False, "reason": "it crashed or hung when it was tried"})
    what = f"{backend}: build, load, generate {NEW_TOKENS} tokens"
    try:
        found = _generate(context, backend)
    except SkipTaskError as missing:
        context.remember(f"backend-{backend}", {"runs": False, "reason": str(missing)})
        raise
    except Exception as error:
        context.remember(f"backend-{backend}", {"runs": False, "reason": reason_of(error)})
        context.recorder.fail(what, error)
        return
    context.remember(f"backend-{backend}", {"runs": True, "reason": ""})
    context.recorder.row(what, f"runs: {found}", verdict="ok", target="runs")


MODULES = {
    "ort-cpu": ("onnxruntime",),
    "ort-cuda": ("onnxruntime",),
    "tensorrt-rtx": ("tensorrt_rtx", "cuda.bindings"),
    "tensorrt": ("tensorrt", "cuda.bindings"),
}


def _generate(context: Context, backend: str) -> str:
    require_modules(*MODULES[backend])
    if backend == "ort-cuda":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise SkipTaskError(
                f"onnxruntime {onnxruntime.__version__} is here without the CUDA provider (onnxruntime-gpu)"
            )
    from tools.gpu_check_lib.bundles import get_bundle, open_executor
    from tools.gpu_check_lib.forced import decode
    from tools.gpu_check_lib.steps import random_tokens

    bundle = get_bundle(context, "tiny" if context.tiny else "small", backend)
    executor = open_executor(bundle, "target", graphs=False, num_rows=1)
    try:
        done = decode(executor, random_tokens(executor.vocab_size, 1, 9), NEW_TOKENS)
    finally:
        executor.close()
    if len(done.outputs[0]) != NEW_TOKENS:
        raise SpecexportError(f"{len(done.outputs[0])} tokens came instead of {NEW_TOKENS}.")
    entry = bundle.manifest.models["target"]
    engine = ", ".join(file.sm for file in entry.engine.files) or "one graph for all"
    return f"{entry.dtype}, lowering {entry.engine.lowering or 'default'}, engine: {engine}; tokens {done.outputs[0]}"
