"""The command: every check, and what they allow together."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import click

from specexport.backends.registry import BACKENDS
from specexport.compile.cache import cache_folder
from specexport.doctor.finding import Finding
from specexport.doctor.gpu import examine_gpu, examine_tensorrt
from specexport.doctor.versions import outside_tested_range, tested_ranges
from specexport.report import print_json
from specexport_runtime.errors import SpecexportError, make_install_hint
from specexport_runtime.executors import operators
from specexport_runtime.executors.open import find_engine_backend
from specexport_runtime.executors.ort_cuda_package import CUDA, are_both_installed, make_reinstall_hint
from specexport_runtime.machine import available_cores, memory_bytes, processor_fields

_CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_MIN_MEMORY = 2 * 10**9


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(*, as_json: bool) -> None:
    """Show what this machine can run, and what to install for the rest. Exits 1 only if no bundle can run."""
    findings = list(run_checks())
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


def run_checks() -> Iterator[Finding]:
    """Look at everything, cheapest first."""
    checks = (_python, _cores, _memory, _cpu_features, _operators, _onnxruntime, _export_stack)
    for check in checks:
        yield check()
    yield from examine_gpu()
    yield examine_tensorrt()
    yield _cache()


def capabilities(findings: list[Finding]) -> dict[str, bool]:
    """What the findings allow."""
    states = {finding.topic: finding.state for finding in findings}
    python, stack = states["python"] != "missing", states["export stack"] != "missing"
    has_gpu = states["gpu"] == "ok" and states.get("driver") != "missing"
    providers = next(finding.found for finding in findings if finding.topic == "onnxruntime")

    def present(modules: tuple[str, ...]) -> bool:
        usable = {"onnxruntime": states["onnxruntime"] != "missing"}
        return python and all(usable[name] if name in usable else _installed(name) for name in modules)

    can = {}
    for name, backend in BACKENDS.items():
        can[f"build bundles for {name}"] = stack and present(backend.modules) and (has_gpu or not backend.needs_gpu)
        runs = find_engine_backend(name)
        can[f"run {name} bundles"] = (
            runs is not None
            and present(runs.modules)
            and (name != "ort-cpu" or states["CPU operators"] != "missing")
            and (has_gpu or not runs.on_gpu)
            and (runs.provider is None or runs.provider in providers)
            and states.get(name) != "missing"
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
    fields = processor_fields()
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    if not flags:
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
    wanted = "cuda" if shutil.which("nvidia-smi") else "cpu"
    if importlib.util.find_spec("onnxruntime") is None:
        return Finding("onnxruntime", "missing", "not installed", make_install_hint(wanted))
    try:
        import onnxruntime

        providers = ", ".join(onnxruntime.get_available_providers())
    except Exception as error:  # a broken native library raises anything
        return Finding("onnxruntime", "missing", f"cannot be imported ({error})", make_reinstall_hint(wanted))
    for_gpus = CUDA in providers
    text = f"{onnxruntime.__version__} with {providers}"
    if are_both_installed():
        text += "; onnxruntime and onnxruntime-gpu are both installed, and have overwritten each other's files"
        return Finding("onnxruntime", "note", text, make_reinstall_hint(wanted))
    name, extra = ("onnxruntime-gpu[cuda,cudnn]", "cuda") if for_gpus else ("onnxruntime", "cpu")
    outside = outside_tested_range(name, onnxruntime.__version__, extra=extra)
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
        return Finding("export stack", "missing", text, make_install_hint("export"))
    return Finding("export stack", "ok", ", ".join(found), " ".join(outside))


def _cache() -> Finding:
    try:
        folder = cache_folder()
    except RuntimeError as error:
        return Finding("cache", "note", f"none ({error})", "set SPECEXPORT_CACHE_DIR to a folder of your own.")
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return Finding("cache", "ok", f"{folder}: {used / 1e9:.2f} GB")
