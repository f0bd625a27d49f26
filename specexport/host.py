"""What this machine has. Imports no heavy package."""

import contextlib
import ctypes
import functools
import gc
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from specexport_runtime.machine import available_cores

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_SELDOM = 50_000  # new objects between two collections; Python's own number is 700


def peak_memory_bytes() -> int:
    """Most resident memory of this process, in bytes: the kernel's count, as ``getrusage``'s survives exec."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def map_in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """``map`` on all cores, for work that lets others run meanwhile (in numpy or torch); plain within such work."""
    return map(work, items) if hasattr(_within, "work") else _threads().map(work, items)


_within = threading.local()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), "specexport", lambda: setattr(_within, "work", True))


def set_malloc_threshold() -> None:
    """Let blocks of a megabyte and more go back to the system when freed: glibc would keep them in a heap."""
    if sys.platform.startswith("linux"):
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, 1 << 20)


@contextlib.contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Within the block, Python seldom collects: that would walk torch's half a million objects each time."""
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(_SELDOM, *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:  # else they are also what other code keeps out of collections
            gc.unfreeze()


def resident_memory() -> dict[str, int]:
    """Bytes of this process in memory: ``"own"``, and ``"mapped"`` from files; zeros where the kernel does not say."""
    sizes = dict.fromkeys(("RssAnon", "RssFile"), 0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            key, _, rest = line.partition(":")
            if key in sizes:
                sizes[key] = int(rest.split()[0]) * 1024
    return {"own": sizes["RssAnon"], "mapped": sizes["RssFile"]}


def query_gpus(fields: str) -> list[str] | None:
    """What ``nvidia-smi`` says of each GPU; None without that command. OSError or SubprocessError: a broken driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - on the PATH
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
