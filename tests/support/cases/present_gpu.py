"""Whether this machine has a GPU that CUDA runs on."""

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.cuda_driver import CudaDriver


def has_gpu() -> bool:
    try:
        CudaDriver().close()
    except SpecexportError:
        return False
    return True
