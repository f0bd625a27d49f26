"""Opening the TensorRT engine of a bundle that fits the GPU of this machine."""

from specexport_runtime.bundle.entry import EngineFile, ModelEntry
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors import cuda_driver, trt_engine
from specexport_runtime.executors.base import EngineBackend, EngineRequest
from specexport_runtime.executors.gpu import GpuInfo
from specexport_runtime.executors.trt import TrtExecutor
from specexport_runtime.executors.trt_engine import RTX

RTX_SM = (75, 80, 86, 89, 120, 121)
"""Compute capabilities for which TensorRT-RTX 1.7 makes kernels, 75 for 7.5."""


def open_trt_executor(request: EngineRequest) -> TrtExecutor:
    """Load the engine for this machine's GPU, and record its decode and verify steps unless that is off."""
    entry, folder = request.entry, request.folder
    use_graphs = request.cuda_graphs is None or request.cuda_graphs
    driver = cuda_driver.CudaDriver()
    try:
        file = choose_engine(entry, f"{folder}: the {request.role}", driver.info())
    except BaseException:
        driver.close()
        raise
    executor = TrtExecutor(
        entry,
        file,
        folder,
        num_rows=request.num_rows,
        driver=driver,
        use_graphs=use_graphs,
        load=trt_engine.load_engine,
    )
    try:
        if use_graphs:
            executor.capture(executor.fixed_shapes())
        executor.reserve_rows(request)
    except BaseException:
        executor.close()
        raise
    return executor


def choose_engine(entry: ModelEntry, what: str, gpu: GpuInfo) -> EngineFile:
    """The engine file for a GPU: one for its architecture, else a portable one; IncompatibleError if there is none."""
    for sm in (gpu.sm, "any"):
        for file in entry.engine.files:
            if file.sm == sm:
                return file
    built = ", ".join(file.sm for file in entry.engine.files) or "none"
    wanted = gpu.sm.removeprefix("sm")
    hint = f"build it again with `specexport build --backend {entry.backend} --sm {wanted}`."
    if entry.backend == RTX and wanted not in map(str, RTX_SM):
        hint = f"build it again with `specexport build --backend ort-cuda`: {RTX} is not for {gpu.sm}."
    raise IncompatibleError(f"{what} has engines for {built}; {gpu.name} is {gpu.sm}.", hint)


BACKEND = EngineBackend(open_trt_executor, on_gpu=True, copies_rows=True, modules=("tensorrt", "cuda"))
BACKEND_RTX = BACKEND._replace(modules=("tensorrt_rtx", "cuda"))
