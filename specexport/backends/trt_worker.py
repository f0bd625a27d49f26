"""One TensorRT engine, built in a separate process: ``python -m specexport.backends.trt_worker JOB.json``.

An abort inside TensorRT then is an error message. Progress and result are JSON lines on standard output.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from specexport.backends.profiles import describe_shapes
from specexport.backends.trt_package import PACKAGES, configure, import_package
from specexport.backends.trt_report import describe_layers, find_network_problems, make_report, parse_layers
from specexport.host import peak_memory_bytes, resident_memory
from specexport_runtime.errors import CheckFailedError, SpecexportError

_HARMLESS = (
    "has Int64 binding",  # the contract's token inputs are int64 on purpose
    "Timing cache operations are no-ops",
)
_PARSE, _BUILD = "parse", "build"
_STRICT_WORDS = ("unused", "precision", "overflow", "subnormal", "clamp", "truncat", "downcast", "out of range")


class MemoryTrail:
    """What this process had in memory as a build went on."""

    def __init__(self) -> None:
        # Bytes, "own" and "mapped" from files: with the "libraries" loaded, the "network" read, when the first bytes of
        # the "engine" came, and when own bytes were the most ("largest") of all samples
        self.marks: dict[str, dict[str, int]] = {}

    def mark(self, name: str) -> None:
        """Note what there is now under ``name``, once."""
        now = self.sample()
        self.marks.setdefault(name, now)

    def sample(self) -> dict[str, int]:
        """Look, and keep the largest."""
        now = resident_memory()
        self.marks["largest"] = max(self.marks.get("largest", now), now, key=lambda parts: parts["own"])
        return now


class Job(NamedTuple):
    """What to build."""

    backend: str  # ``tensorrt`` or ``tensorrt-rtx``
    model: str  # the lowered graph
    sm: str  # architecture, for example ``89``
    profiles: list[str]  # names of the profiles, in order
    shapes: list[Mapping[str, Any]]  # for each profile, smallest, optimal and largest shape of each input
    engine: str  # file to write
    log: str  # file for what TensorRT says
    num_layers: int  # attention layers of the model
    float32_products: list[str]  # names of the matrix products that the model itself has in float32
    plugins: list[str]  # names of the plugins in the graph


def main(path: str) -> int:
    """Build one job; returns the exit code."""
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        with Path(job.log).open("w", encoding="utf-8") as log:
            report = build(job, log)
    except SpecexportError as error:
        _print_event(event="error", kind=type(error).__name__, message=error.message, hint=error.hint)
        return 1
    _print_event(event="done", report=report)
    return 0


def _print_event(**event: Any) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - the line is the interface


def build(job: Job, log: TextIO) -> dict[str, Any]:
    """Parse, check and build; writes the engine file and returns the report. CheckFailedError if it is inexact."""
    package = PACKAGES[job.backend]
    trt = import_package(package)
    logger = _make_logger(trt, log)
    memory = MemoryTrail()
    memory.mark("libraries")
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    if job.plugins:
        from specexport.plugin.definitions import register_plugins

        register_plugins(job.plugins, job.sm)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job.model):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise CheckFailedError(f"TensorRT cannot read the graph: {'; '.join(errors[:3])}.")
    _refuse_warnings(logger)
    problems = find_network_problems(trt, network, job.num_layers, job.float32_products)
    if problems:
        raise CheckFailedError(f"the TensorRT network is not what was lowered: {'; '.join(problems[:5])}.")
    logger.stage = _BUILD
    memory.mark("network")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    configure(trt, package, config, job.sm, has_plugins=bool(job.plugins))
    if job.plugins:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    _add_profiles(builder, network, config, job, log)
    monitor = _make_monitor(trt, memory)
    config.progress_monitor = monitor
    started = time.perf_counter()
    # Written as it is serialized: a second copy of the weights in memory would be the largest of all.
    half = Path(f"{job.engine}.tmp")
    with half.open("wb") as file:
        done = builder.build_serialized_network_to_stream(network, config, _make_writer(trt, file, memory))
    if not done:
        said = "; ".join(logger.errors[:2]) or "it gives no reason"
        raise CheckFailedError(f"TensorRT cannot build this graph for sm {job.sm}: {said}")
    _refuse_warnings(logger)
    os.replace(half, job.engine)
    measured = {
        "build_seconds": time.perf_counter() - started,
        "engine_bytes": Path(job.engine).stat().st_size,
        "peak_memory_bytes": peak_memory_bytes(),
        "memory": memory.marks,
    }
    layers = parse_layers(logger.text)
    log.write(describe_layers(layers))
    report = make_report(trt, network, logger.text, layers, job.profiles)
    return report | measured | {"version": str(trt.__version__)}


def _add_profiles(builder: Any, network: Any, config: Any, job: Job, log: TextIO) -> None:
    inputs = [network.get_input(i).name for i in range(network.num_inputs)]
    for name, shapes in zip(job.profiles, job.shapes, strict=True):
        if set(shapes) != set(inputs):
            odd = sorted(set(shapes) ^ set(inputs))
            raise CheckFailedError(f"the graph's inputs are not the contract's: {', '.join(odd[:5])}.")
        profile = builder.create_optimization_profile()
        for tensor, (low, best, high) in shapes.items():
            profile.set_shape(tensor, tuple(low), tuple(best), tuple(high))
        log.write(f"profile {name}: {describe_shapes(shapes)}\n")
        if config.add_optimization_profile(profile) < 0:
            raise CheckFailedError(f"TensorRT refuses the profile {name}.")


def _make_writer(trt: Any, file: BinaryIO, memory: MemoryTrail) -> Any:
    """What TensorRT hands the serialized engine to, piece by piece."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # the package has no types
        def write(self, data: bytes) -> int:
            memory.mark("engine")
            return file.write(data)

    return Writer()


def _refuse_warnings(logger: Any) -> None:
    if logger.refused:
        raise CheckFailedError(
            f"TensorRT warns that the engine would not be exact: {'; '.join(logger.refused[:3])}",
            "report this model; the build log has the rest.",
        )


def _make_logger(trt: Any, log: TextIO) -> Any:
    """A logger that keeps the engine's layer list, writes the rest to the log, and collects what is refused.

    While parsing that is every warning not known to be harmless: the parser drops what it does not know.
    """

    class Collector(trt.ILogger):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.stage = _PARSE
            self.refused: list[str] = []
            self.errors: list[str] = []
            self.text: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            if severity == trt.ILogger.WARNING and _is_refused(self.stage, message):
                self.refused.append(message)
            if "Layers:" in message or "Memory:" in message:
                self.text.append(message)
            if severity <= trt.ILogger.INFO:
                log.write(f"[{severity.name}] {message}\n")

    return Collector()


def _is_refused(stage: str, message: str) -> bool:
    if any(text in message for text in _HARMLESS):
        return False
    return stage == _PARSE or any(word in message.lower() for word in _STRICT_WORDS)


def _make_monitor(trt: Any, memory: MemoryTrail) -> Any:
    """Reports the outermost phases of the build, at most ten times a second."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, tuple[int, int]] = {}  # name: (depth, steps)
            self.last = 0.0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            depth = 0 if parent is None else self.phases.get(parent, (0, 0))[0] + 1
            self.phases[phase] = (depth, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            depth, steps = self.phases.get(phase, (9, 1))
            now = time.perf_counter()
            memory.sample()
            if depth <= 1 and now - self.last >= 0.1:
                self.last = now
                _print_event(event="progress", phase=phase, done=step + 1, total=steps)
            return True

        def phase_finish(self, phase: str) -> None:
            self.phases.pop(phase, None)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
