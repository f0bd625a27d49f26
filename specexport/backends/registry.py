"""Every backend of this release, by name. A new one is a line here."""

from specexport.backends.base import Backend
from specexport.backends.ort_cpu import OrtCpu
from specexport.backends.ort_cuda import OrtCuda
from specexport.backends.tensorrt import TensorRt, TensorRtRtx
from specexport_runtime.errors import RecipeError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (OrtCpu(), OrtCuda(), TensorRt(), TensorRtRtx())}

DEFAULT_BACKEND = next(iter(BACKENDS))


def find_backend(name: str) -> Backend:
    """The backend of that name; RecipeError lists the known ones if there is none."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise RecipeError(f"backend {name!r} is not in this release.", f"use one of: {', '.join(BACKENDS)}.")
    return backend
