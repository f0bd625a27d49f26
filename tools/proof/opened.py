"""A ``TrtExecutor`` over a proof engine, on the GPU of this machine or on a CPU that plays one."""

from pathlib import Path

from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.trt import TrtExecutor
from tools.proof.devices import CudaDevice, Device, HostGpu
from tools.proof.engine import proof_loader
from tools.proof.graph import read_engine
from tools.proof.models import plan_entry


def open_engine(
    path: Path, profiles: tuple[Profile, ...], *, num_rows: int, graphs: bool, gpu: HostGpu | None = None
) -> TrtExecutor:
    """Open an engine file as ``open_trt_executor`` opens a TensorRT engine.

    ``profiles`` are step sizes to run, as a build would plan them; ``num_rows`` are cache rows; with ``graphs`` the
    fixed profiles' steps are recorded before the first one is asked for. ``gpu`` is a CPU that plays a GPU; None stands
    for the real one, by way of cuda-python. IncompatibleError: there is no GPU, or too little memory.
    MissingDependencyError: cuda-python is not installed.
    """
    driver: GpuDriver
    device: Device
    if gpu is None:
        from specexport_runtime.executors.cuda_driver import CudaDriver

        driver, device = CudaDriver(), CudaDevice()
    else:
        driver = device = gpu
    graph, _ = read_engine(path)
    entry = plan_entry(graph, path, profiles, driver.info().sm)
    executor = TrtExecutor(
        entry, entry.engine.files[0], path.parent, num_rows=num_rows, driver=driver, use_graphs=graphs,
        load=proof_loader(device),
    )  # fmt: skip
    if graphs:
        executor.capture(executor.fixed_shapes())
    return executor
