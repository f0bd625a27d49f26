"""The NVIDIA GPU: its driver, and what each package for it can do there."""

import importlib.util
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from specexport.doctor.finding import Finding
from specexport.doctor.versions import outside_tested_range
from specexport.host import query_gpus
from specexport_runtime.errors import SpecexportError, make_install_hint
from specexport_runtime.executors.gpu import OLDEST_DRIVER
from specexport_runtime.executors.ort_cuda_package import CUDA, explain_missing_code, make_reinstall_hint, run_step
from specexport_runtime.executors.ort_cuda_session import import_onnxruntime, summarize_error
from specexport_runtime.executors.trt_open import RTX_SM

_NEW_DRIVER = f"install NVIDIA driver {OLDEST_DRIVER} or newer."
_OTHER_WAY = "build bundles with --backend {} for this GPU."


class SmiGpu(NamedTuple):
    """What ``nvidia-smi`` says of a GPU."""

    name: str
    driver: str  # "580.159.04"
    memory: str  # "81559 MiB"
    capability: str  # "9.0"

    @property
    def sm(self) -> int:
        """90 for compute capability 9.0; 0 where it is not a number."""
        digits = self.capability.replace(".", "")
        return int(digits) if digits.isdigit() else 0


def examine_gpu() -> Iterator[Finding]:
    """The GPU, and with one: its driver and each package; one line without one."""
    try:
        lines = query_gpus(",".join(("name", "driver_version", "memory.total", "compute_cap")))
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("gpu", "note", f"nvidia-smi fails ({error})", f"mend the driver, or {_NEW_DRIVER}")
        return
    if not lines:
        why = "there is no nvidia-smi" if lines is None else "nvidia-smi lists none"
        yield Finding("gpu", "note", f"no GPU ({why}); bundles for one can be built here, not run")
        return
    cards = [SmiGpu(*(part.strip() for part in line.rsplit(",", 3))) for line in lines]
    yield Finding("gpu", "ok", "; ".join(f"{card.name}, {card.memory}, sm{card.sm}" for card in cards))
    yield _driver(cards[0].driver)
    yield _ort_cuda(cards[0])
    if cards[0].sm not in RTX_SM:
        have = ", ".join(map(str, RTX_SM))
        found = f"TensorRT-RTX 1.7 is not for sm{cards[0].sm}, only for sm {have}"
        yield Finding("tensorrt-rtx", "missing", found, _OTHER_WAY.format("ort-cuda or tensorrt"))


def _driver(installed: str) -> Finding:
    major = installed.partition(".")[0]
    if not major.isdigit() or int(major) >= OLDEST_DRIVER:
        return Finding("driver", "ok", installed)
    found = f"{installed}; onnxruntime-gpu, TensorRT and cuda-python are for CUDA 13, which wants {OLDEST_DRIVER}"
    return Finding("driver", "missing", found, _NEW_DRIVER)


def _ort_cuda(card: SmiGpu) -> Finding:
    """Whether ONNX Runtime computes on the GPU, by one step."""
    try:
        import onnxruntime as ort

        has_provider = CUDA in ort.get_available_providers()
    except Exception as error:  # a broken native library raises anything
        absent = isinstance(error, ModuleNotFoundError)
        found = "onnxruntime-gpu is not installed" if absent else f"onnxruntime cannot be imported ({error})"
        return Finding("ort-cuda", "missing", found, make_install_hint("cuda") if absent else make_reinstall_hint())
    if not has_provider:
        return Finding("ort-cuda", "missing", "onnxruntime is the package for CPUs", make_reinstall_hint())
    if reason := explain_missing_code(ort.__version__, card.sm):
        return Finding("ort-cuda", "missing", reason, _OTHER_WAY.format("tensorrt"))
    try:
        run_step(import_onnxruntime(0), 0)
    except SpecexportError as error:
        return Finding("ort-cuda", "missing", error.message, error.hint or "")
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        return Finding(
            "ort-cuda", "missing", f"a step fails on the GPU: {summarize_error(error)}", make_reinstall_hint()
        )
    return Finding("ort-cuda", "ok", f"onnxruntime-gpu {ort.__version__} ran a step on {card.name}")


def examine_tensorrt() -> Finding:
    """Which TensorRT packages are installed."""
    found = []
    for extra, name in (("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt-rtx-cu13")):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if outside := outside_tested_range(name, installed, extra=extra):
            return Finding("tensorrt", "note", f"{name} {installed}", outside)
        found.append(f"{name} {installed}")
    if not found:
        return Finding(
            "tensorrt", "note", "not installed", f"{make_install_hint('tensorrt-rtx')} It builds on any machine."
        )
    if importlib.util.find_spec("cuda") is None:
        return Finding("tensorrt", "note", ", ".join(found), "pip install 'cuda-python>=13.0,<14' to run engines.")
    return Finding("tensorrt", "ok", ", ".join(found))
