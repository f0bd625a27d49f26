"""What this machine is: its cores, its processor, and how to give memory back to it. Imports the standard library."""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def available_cores() -> int:
    """CPU cores this process may really use: the affinity mask, cut by the CPU quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # a controller that is off has no file, "max" is no number
            if (file := folder / "cpu.max").exists():
                quota, period = map(int, file.read_text(encoding="ascii").split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{each}_us").read_text()) for each in ("quota", "period"))
            if quota > 0:  # cgroup v1 writes -1 for none
                cores = min(cores, quota // period)
    return max(1, cores)


def control_groups(
    controller: str, root: Path = Path("/sys/fs/cgroup"), listed: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """Folders of the control groups that may limit this process: its own and all above, of cgroup v2 and of v1."""
    try:
        lines = listed.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for top in dict.fromkeys([root / controllers, root / controller]) if controllers else [root]:
            folder = top / group.lstrip("/")  # in a container the host's path is not there, but what is above it is
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def memory_bytes() -> tuple[int, int, int | None]:
    """Installed and available memory in bytes, and the least limit of a control group, if any (0, 0 where unknown)."""
    values: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, rest = line.partition(":")
            values[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0, 0, None
    limits = []
    for folder in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int((folder / name).read_text(encoding="ascii")))
    limit = min((each for each in limits if each < values.get("MemTotal", 0)), default=None)  # v1 has no "max"
    return values.get("MemTotal", 0), values.get("MemAvailable", 0), limit


def free_memory() -> int | None:
    """Bytes that this process may still take: what the system has, within ``ulimit -v``; None where it is not said."""
    free = memory_bytes()[1]
    if not free:
        return None
    with contextlib.suppress(OSError, ImportError):  # Windows has no such limit
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            free = min(free, max(0, limit - taken))
    return free


def describe_memory_shortage(needs: int) -> str:
    """``not enough memory``, with the bytes that are needed and those that may be used."""
    free = free_memory()
    used = "" if free is None else f", {free / 1e9:.1f} GB may be used"
    return f"not enough memory: needs about {max(0.1, needs / 1e9):.1f} GB{used}"


def is_memory_error(error: BaseException) -> bool:
    """Whether an error, of a library as well, says that the system gave no memory."""
    said = "bad.alloc|failed to map segment|cannot allocate memory|out of memory"
    return isinstance(error, MemoryError) or re.search(said, str(error), re.IGNORECASE) is not None


def find_excessive_load() -> float | None:
    """The load of the last minute where it is above the usable cores; None where it is not, or is not known."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return None
    return load if load > available_cores() else None


def max_thread_count() -> int:
    """More compute threads than this are a mistake: four a core, and on any machine some dozens to experiment with."""
    return max(64, 4 * (os.cpu_count() or 1))


def machine_key() -> str:
    """Hash of what timings depend on: processor, platform, usable cores, kernel, onnxruntime, numpy, NVIDIA GPUs."""
    cores = str(available_cores())
    gpus = {"gpus": ", ".join(names)} if (names := gpu_names()) else {}
    facts = {"cores": cores, "release": platform.release(), "numpy": _version("numpy")}
    facts["kernels"] = os.environ.get("SPECEXPORT_CPU_KERNELS", "")  # else those of the processor
    return _digest({**_processor_facts(), **facts, **gpus})


def gpu_names(folder: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Models of the NVIDIA GPUs that this process sees, sorted, by the driver's ``folder``; on Linux only."""
    found = []
    for path in folder.glob("*/information"):
        with contextlib.suppress(OSError):
            fields = (line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
            found += [value.strip() for name, _, value in fields if name.strip() == "Model"]
    return tuple(sorted(found))


def _digest(facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _processor_facts() -> dict[str, str]:
    name, flags = _cpu()
    return {
        "cpu": name,
        "flags": flags,
        "system": platform.system(),
        "machine": platform.machine(),
        "onnxruntime": _version("onnxruntime"),
    }


def read_versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed version of each package; those that are not installed are left out."""
    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _version(package: str) -> str:
    return read_versions([package]).get(package, "not installed")


def processor_fields() -> dict[str, str]:
    """What Linux says of the first core, by name; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _cpu() -> tuple[str, str]:
    """Model name and instruction-set flags of the first core."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # The command is fixed.
            done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=5)  # noqa: S603
            return done.stdout.strip(), ""
    fields = processor_fields()
    if not fields:
        return platform.processor(), ""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")  # x86, Arm
    return " ".join(fields.get(name, "") for name in names), fields.get("flags") or fields.get("Features", "")


def return_freed_memory() -> None:
    """Give freed heap memory back to the system, which the C library keeps for later."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
