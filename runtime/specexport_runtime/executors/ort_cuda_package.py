"""The package ``onnxruntime-gpu``: whether it is alone, has code for a GPU, and computes there."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from specexport_runtime.errors import CheckFailedError, make_install_hint

CUDA = "CUDAExecutionProvider"
CODE = {"1.31.1": (75, 80, 86, 89, 90, 120)}
"""Architectures of the machine code in each wheel. None has PTX, which a driver could compile for other GPUs."""
_CARDS = {100: ", as of a B200 or GB200", 103: ", as of a B300 or GB300", 110: ", as of a Thor"}
_STEP = bytes.fromhex(
    "080a3a500a110a01780a017812017022064d61744d756c0a0e0a01700a017812017922034164641201675a130a0178120e0a0c080a12080a02"
    "08080a02080862130a0179120e0a0c080a12080a0208080a02080842040a001017"
)
"""An ONNX graph over [8, 8] float16: ``y = x @ x + x``. A machine that only runs bundles has no ``onnx`` to make it."""


def make_reinstall_hint(extra: str = "cuda") -> str:
    """A hint: `onnxruntime` and `onnxruntime-gpu` share their files, so both go before one comes."""
    return f"pip uninstall -y onnxruntime onnxruntime-gpu, then {make_install_hint(extra)}"


def are_both_installed() -> bool:
    """Whether both packages are: the one that was installed last has overwritten the other's files."""
    try:
        return bool(version("onnxruntime") and version("onnxruntime-gpu"))
    except PackageNotFoundError:
        return False


def explain_missing_code(installed: str, capability: int) -> str | None:
    """Why a version of the package cannot run on a GPU (90 for 9.0; 0: not known); None if it can, or nobody knows."""
    code = CODE.get(installed, ())
    # Code for 8.0 runs on 8.7, but not on 9.0.
    if not capability or not code or any(sm // 10 == capability // 10 and sm <= capability for sm in code):
        return None
    has = ", ".join(f"{sm // 10}.{sm % 10}" for sm in code)
    return (
        f"onnxruntime-gpu {installed} has no code for a GPU of compute capability {capability / 10}"
        f"{_CARDS.get(capability, '')}; it has code for {has}"
    )


def run_step(ort: Any, device_id: int) -> None:
    """Run a matrix product and a sum on a GPU; CheckFailedError if they are wrong, else whatever onnxruntime raises."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = ort.InferenceSession(_STEP, options, providers=[(CUDA, {"device_id": str(device_id)})])
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(np.ones((8, 8), np.float16), "cuda", device_id))
    binding.bind_output("y", "cuda", device_id)
    session.run_with_iobinding(binding)
    found = np.unique(binding.copy_outputs_to_cpu()[0])
    if found.tolist() != [9]:
        raise CheckFailedError(f"8 products and a sum of ones gave {found.tolist()} on the GPU, not 9.")
