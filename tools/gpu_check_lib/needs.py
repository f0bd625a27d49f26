"""What a task needs of a machine: modules, and a GPU that torch sees."""

import importlib.util
from typing import Any

from tools.gpu_check_lib.context import Context, SkipTaskError


def require_modules(*names: str) -> None:
    """Skip (SkipTaskError) what needs a module that is not here."""
    for name in names:
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # its parent is missing
            is_there = False
        if not is_there:
            raise SkipTaskError(f"the Python module {name} is not installed here")


def require_gpu() -> None:
    """Skip the task (SkipTaskError) without torch, Triton and a GPU that torch sees."""
    if not _sees_gpu():
        import torch

        raise SkipTaskError(f"torch {torch.__version__} sees no GPU")


def require_device(context: Context) -> str:
    """Where kernels run: ``"cuda"``, or ``"cpu"`` in a dry run that interprets them; SkipTaskError if neither."""
    sees_gpu = _sees_gpu()
    import triton

    interprets: Any = triton.knobs.runtime.interpret
    if not sees_gpu and context.tiny and interprets:
        return "cpu"
    require_gpu()
    return "cuda"


def _sees_gpu() -> bool:
    require_modules("torch", "triton")
    import torch

    return bool(torch.cuda.is_available())
