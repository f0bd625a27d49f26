"""Which tasks there are, in the order they run, and where their code is. Imports nothing heavy."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial

from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.runner import Task

CPU = "ort-cpu"
GPU_BACKENDS = ("ort-cuda", "tensorrt-rtx", "tensorrt")
SECTIONS = {
    "machine": "1. machine and backends",
    "outputs": "2. engine output against the CPU engine",
    "kernels": "3. attention kernels",
    "loop": "4. executor and decoding loop over a proof engine",
    "graphs": "5. graph replay against eager",
    "speed": "6. speed of a model of 1 B parameters",
}
"""Headings by name."""

# task: (module, here unless it is dotted, function, seconds, needed to start). The order is that of running.
_BEFORE = {
    # What needs no carried package comes first.
    "machine.info": ("machine", "info", 30, 1),
    "kernels.correct": ("kernels", "check_all", 80, 15),
    "kernels.speed": ("kernel_speed", "measure_kernels", 80, 15),
    "loop.greedy": ("tools.proof.checks", "check_greedy", 60, 5),
    "loop.graphs": ("tools.proof.checks", "check_graphs", 60, 10),
    "loop.speed": ("tools.proof.checks", "measure_loop", 150, 30),
    "loop.verify": ("tools.proof.checks", "verify_loop", 60, 5),
    "loop.sampled": ("tools.proof.sampled", "check_sampled", 60, 10),
    "machine.ort-cpu": ("machine", "try_backend", 75, 15),
    "machine.ort-cuda": ("machine", "try_backend", 75, 15),
    "machine.tensorrt-rtx": ("machine", "try_backend", 90, 15),
    "machine.tensorrt": ("machine", "try_backend", 75, 15),
}
_PER_BACKEND = {
    "outputs.{}": ("outputs", "check_outputs", 60, 10),
    "outputs.verify-{}": ("verify", "verify_bundle", 90, 10),
    "graphs.{}": ("graphs", "compare_graphs", 60, 5),
    "speed.build-{}": ("speed", "build_pair", 180, 30),
    "speed.measure-{}": ("speed", "measure_speed", 150, 15),
}
# int4 engines of ort-cuda: before what takes longest.
_INT4 = {
    "outputs.sampled-ort-cuda": ("tools.proof.sampled", "check_backend", 60, 10),
    "outputs.int4-ort-cuda": ("outputs", "check_int4", 60, 15),
}

_ESTIMATES = {
    "machine.info": 1, "machine.ort-cpu": 22, "machine.ort-cuda": 22,
    "machine.tensorrt-rtx": 45, "machine.tensorrt": 45, "kernels.correct": 23, "kernels.speed": 16,
    "loop.greedy": 8, "loop.graphs": 13, "loop.speed": 33, "loop.verify": 8,
    "loop.sampled": 20, "outputs.sampled": 15,
    "outputs": 21, "outputs.verify": 16, "graphs": 6,
    "outputs.int4": 25, "speed.build": 53, "speed.build-tensorrt-rtx": 120,
    "speed.build-tensorrt": 120, "speed.measure": 50,
}  # fmt: skip
"""Seconds that a task takes on a GPU machine, by name, or by its name less the backend: measured on an H200, but for
TensorRT, which are estimates. A task without an entry counts with its limit. They plan calls;
nothing is cut short by them."""


def _entries(backends: Sequence[str]) -> dict[str, tuple[str, str, int, int, str]]:
    """Every task for the backends: module, function, seconds, needed, backend (empty: it takes none)."""
    found: dict[str, tuple[str, str, int, int, str]] = {}
    gpu = [backend for backend in backends if backend != CPU]
    for name, entry in _BEFORE.items():
        backend = name.partition(".")[2] if entry[1] == "try_backend" else ""
        if not backend or backend in (*backends, CPU):
            found[name] = (*entry, backend)
    # The comparison of a backend with itself is a dry run's only.
    speeds = [key for key in _PER_BACKEND if key.startswith("speed")]
    for key in ("outputs.{}", "outputs.verify-{}", "graphs.{}"):
        found |= {key.format(backend): (*_PER_BACKEND[key], backend) for backend in gpu or backends}
    if "ort-cuda" in gpu:
        found |= {name: (*entry, "") for name, entry in _INT4.items()}
    for backend in gpu or backends:
        found |= {key.format(backend): (*_PER_BACKEND[key], backend) for key in speeds}
    return found


def estimate_of(task: Task) -> float:
    """Seconds that a task is likely to take; its limit where that is not known."""
    backend = next((each for each in (*GPU_BACKENDS, CPU) if task.name.endswith(each)), "")
    names = (task.name, task.name.removesuffix(backend).rstrip(".-"))
    return float(next((_ESTIMATES[name] for name in names if name in _ESTIMATES), task.seconds))


def list_tasks(backends: Sequence[str], only: Sequence[str] = ()) -> list[Task]:
    """Tasks in order; ``only`` names sections or tasks, and is empty for all.

    ValueError: a name of ``only`` is neither.
    """
    tasks = []
    for name, (_, _, seconds, needed, _) in _entries(backends).items():
        tasks.append(Task(name, SECTIONS[name.partition(".")[0]], float(seconds), float(needed)))
    known = {task.name for task in tasks} | set(SECTIONS)
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"there is no section or task {unknown[0]!r}; --list shows them.")
    return [task for task in tasks if not only or task.name in only or task.section in only]


def function_of(name: str, backends: Sequence[str] = (*GPU_BACKENDS, CPU)) -> Callable[[Context], None]:
    """The code of a task; imports its module."""
    gpu_and_cpu = _entries(backends) | _entries((CPU,))
    module, attribute, _, _, backend = gpu_and_cpu[name]
    place = module if "." in module else f"tools.gpu_check_lib.{module}"
    found: Callable[..., None] = getattr(importlib.import_module(place), attribute)
    return partial(found, backend=backend) if backend else found
