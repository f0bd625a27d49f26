"""``specexport doctor``: what this machine can run, and why not. Imports nothing heavy to find out."""

import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

import click

from specexport.backends.registry import BACKENDS
from specexport.compile.cache import cache_folder
from specexport.host import memory_bytes, query_gpus
from specexport.report import print_json
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors import operators
from specexport_runtime.executors.open import backend_of
from specexport_runtime.machine import available_cores

State = Literal["ok", "missing", "note"]

_CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_MIN_MEMORY = 2 * 10**9


class Finding(NamedTuple):
    """One line of the report."""

    topic: str  # what was looked at
    state: State  # ``"missing"``: something cannot be done; ``"note"``: optional, or slower than it could be
    found: str
    fix: str = ""  # how to get what is missing; empty if nothing is


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(*, as_json: bool) -> None:
    """Show what this machine can run, and what to install for the rest. Exits 1 only if no bundle can run."""
    findings = list(examine())
    can = capabilities(findings)
    if as_json:
        print_json({"can": can, "findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            fix = f"  -> {finding.fix}" if finding.fix else ""
            click.echo(f"{finding.state:<8}{finding.topic:<14}{finding.found}{fix}")
        for name, possible in can.items():
            click.echo(f"{'can' if possible else 'cannot':<8}{name}")
    if not any(possible for name, possible in can.items() if name.startswith("run")):
        click.get_current_context().exit(1)


def examine() -> Iterator[Finding]:
    """Look at everything, cheapest first."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python, _cores, _memory, _cpu_features, _operators, _onnxruntime, _export_stack, _gpu, _tensorrt, _cache
    )  # fmt: skip
    for check in checks:
        yield check()


def capabilities(findings: list[Finding]) -> dict[str, bool]:
    """What the findings allow."""
    states = {finding.topic: finding.state for finding in findings}
    python, stack = states["python"] != "missing", states["export stack"] != "missing"
    has_gpu = states["gpu"] == "ok"
    providers = next(finding.found for finding in findings if finding.topic == "onnxruntime")

    def present(modules: tuple[str, ...]) -> bool:
        usable = {"onnxruntime": states["onnxruntime"] != "missing"}
        return python and all(usable[name] if name in usable else _installed(name) for name in modules)

    can = {}
    for name, backend in BACKENDS.items():
        can[f"build bundles for {name}"] = stack and present(backend.modules) and (has_gpu or not backend.needs_gpu)
        runs = backend_of(name)
        can[f"run {name} bundles"] = (
            runs is not None
            and present(runs.modules)
            and (name != "ort-cpu" or states["CPU operators"] != "missing")
            and (has_gpu or not runs.on_gpu)
            and (runs.provider is None or runs.provider in providers)
        )
    return can


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11):
        return Finding("python", "ok", text)
    return Finding("python", "missing", text, "use Python 3.11 or later.")


def _cores() -> Finding:
    cores, installed = available_cores(), os.cpu_count() or 1
    limit = "" if cores == installed else f" of {installed} (limited by affinity or a container)"
    return Finding("cores", "ok", f"{cores}{limit}; this is the default thread count")


def _memory() -> Finding:
    total, free, limit = memory_bytes()
    usable = min(total, limit) if limit is not None else total
    text = f"{usable / 1e9:.1f} GB, {min(free, usable) / 1e9:.1f} GB free"
    text += " (container limit)" if limit is not None and limit < total else ""
    if usable < _MIN_MEMORY:
        return Finding("memory", "note", text, "building needs about 2.5 times the float32 weights.")
    return Finding("memory", "ok", text)


def _cpu_features() -> Finding:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), None
    )
    if flags is None:
        return Finding("cpu features", "note", f"unknown on {platform.machine()}")
    if platform.machine() not in ("x86_64", "AMD64"):
        return Finding("cpu features", "ok", f"{platform.machine()}: {', '.join(sorted(flags))}")
    present = [name for name in _CPU_FEATURES if name in flags]
    absent = [name for name in _CPU_FEATURES if name not in flags]
    text = (", ".join(present) or "none") + (f" (without {', '.join(absent)})" if absent else "")
    return Finding("cpu features", "ok" if "avx2" in flags else "note", text)


def _operators() -> Finding:
    """Which kernels of our own operators run."""
    try:
        operators.check_sources()
        chosen, others = operators.kernels(), operators.runnable_kernels()
    except SpecexportError as error:
        return Finding("CPU operators", "missing", error.message, error.hint or "")
    rest = ", ".join(name for name in others if name != chosen)
    text = chosen + (f" (runs here too: {rest})" if rest else "")
    return Finding("CPU operators", "note" if chosen == "portable" else "ok", text)


def _onnxruntime() -> Finding:
    if importlib.util.find_spec("onnxruntime") is None:
        return Finding("onnxruntime", "missing", "not installed", "pip install 'specexport[cpu]'.")
    try:
        import onnxruntime

        providers = ", ".join(onnxruntime.get_available_providers())
    except Exception as error:  # a broken native library raises anything
        return Finding("onnxruntime", "missing", f"cannot be imported ({error})", "pip install -U 'specexport[cpu]'.")
    outside = outside_tested_range("onnxruntime", onnxruntime.__version__, extra="cpu")
    text = f"{onnxruntime.__version__} with {providers}"
    return Finding("onnxruntime", "note" if outside else "ok", text, outside)


def _export_stack() -> Finding:
    names = [name for name, _ in tested_ranges("export")]
    missing, found, outside = [], [], []
    for name in names:
        try:
            installed = version(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        found.append(f"{name} {installed}")
        if problem := outside_tested_range(name, installed, extra="export"):
            outside.append(problem)
    if missing or not names:
        text = f"without {', '.join(missing)}" if missing else "unknown"
        return Finding("export stack", "missing", text, "pip install 'specexport[export,cpu]'.")
    return Finding("export stack", "ok", ", ".join(found), " ".join(outside))


def tested_ranges(extra: str) -> list[tuple[str, str]]:
    """Distribution and tested version range of each requirement of one of our extras, as installed."""
    try:
        lines = requires("specexport") or []
    except PackageNotFoundError:
        return []
    ranges = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if f"'{extra}'" in marker or f'"{extra}"' in marker:
            name = requirement.strip()
            cut = min((name.find(sign) for sign in "<>=!~ (" if sign in name), default=len(name))
            ranges.append((name[:cut], name[cut:].strip(" ()")))
    return ranges


def outside_tested_range(name: str, installed: str, *, extra: str) -> str:
    """What to say of a version outside its tested range; empty if it is inside."""
    for requirement, wanted in tested_ranges(extra):
        if requirement == name and not _satisfies(installed, wanted):
            return f"{name} {installed} is outside the tested {wanted}: pip install '{name}{wanted}'."
    return ""


def _satisfies(installed: str, wanted: str) -> bool:
    """Whether a version is inside a range of ``>=`` and ``<`` clauses, the only ones our requirements use."""
    have = _release(installed)
    for clause in filter(None, wanted.split(",")):
        if clause.startswith(">=") and have < _release(clause[2:]):
            return False
        if clause.startswith("<") and not clause.startswith("<=") and have >= _release(clause[1:]):
            return False
    return True


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:  # 1.31 and 1.31.0 are the same
        numbers.pop()
    return tuple(numbers)


def _gpu() -> Finding:
    try:
        found = query_gpus("name,driver_version,memory.total,compute_cap")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpu", "note", f"nvidia-smi fails ({error})", "mend the NVIDIA driver.")
    if found is None:
        return Finding("gpu", "note", "no nvidia-smi: no NVIDIA driver here; GPU engines can be built, not run")
    cards = "; ".join(found)
    return Finding("gpu", "ok" if cards else "note", cards or "none")


def _tensorrt() -> Finding:
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
            "tensorrt", "note", "not installed", "pip install 'specexport[tensorrt-rtx]' builds on any machine."
        )
    if not _installed("cuda"):
        return Finding("tensorrt", "note", ", ".join(found), "pip install 'cuda-python>=13.0,<14' to run engines.")
    return Finding("tensorrt", "ok", ", ".join(found))


def _cache() -> Finding:
    try:
        folder = cache_folder()
    except RuntimeError as error:
        return Finding("cache", "note", f"none ({error})", "set SPECEXPORT_CACHE_DIR to a folder of your own.")
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return Finding("cache", "ok", f"{folder}: {used / 1e9:.2f} GB")
