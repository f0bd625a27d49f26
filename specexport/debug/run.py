"""From two bundles, or two graphs of one, to a comparison: what may be compared, and what not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from specexport.progress import Progress, StageClock
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.quant_kinds import get_limits
from specexport_runtime.errors import (
    IncompatibleError,
    InvalidRequestError,
    MissingDependencyError,
    OutputExistsError,
    describe_not_installed,
    make_install_hint,
)

if TYPE_CHECKING:
    from specexport.debug.capture import CapturedStep, StepKind
    from specexport.debug.compare import Comparison
    from specexport.debug.graph import EngineGraph
    from specexport_runtime.bundle.opened import Bundle

BACKEND = "ort-cpu"
CACHE_BACKENDS = ("tensorrt", "tensorrt-rtx")
"""Their engines show what they leave in the caches."""
GraphKind = Literal["engine", "padded"]
GRAPHS: tuple[GraphKind, ...] = get_args(GraphKind)
STEPS = ("prefill", "decode", "verify")
TOLERANCES = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""Default tolerance by the dtype of the less exact graph, where nothing is approximate in it."""
_TRACING = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class DebugOptions:
    """What to compare, in which step; InvalidRequestError for a bad value, OutputExistsError for ``save``."""

    # bundle whose graph is the reference; None takes the engine's own graph of the same bundle
    against: Path | None = None
    graph: GraphKind = "engine"  # the engine's own, or the one for padded caches
    role: str = "target"  # ``"target"`` or ``"draft"``
    step: "StepKind" = "verify"
    after: int = 0  # tokens decoded before the step
    tolerance: float | None = None  # largest relative error of a tensor; None takes the default
    layers: Sequence[str] = ()  # patterns of layers whose effect on the logits is measured; empty takes all
    save: Path | None = None  # new folder to write both graphs and the step to
    num_threads: int | None = None  # None takes the cores available

    def __post_init__(self) -> None:
        if self.against is None and self.graph == "engine":
            raise InvalidRequestError(
                "there is nothing to compare the engine with.",
                "give --against a bundle of the same checkpoint, or --graph padded.",
            )
        for name, value, known in (("graph", self.graph, GRAPHS), ("step", self.step, STEPS)):
            if value not in known:
                raise InvalidRequestError(f"--{name} is {value!r}.", f"give one of {', '.join(known)}.")
        if self.tolerance is not None and not 0 < self.tolerance < float("inf"):
            raise InvalidRequestError(f"--tolerance is {self.tolerance}.", "give a number above 0, for example 0.01.")
        if self.after < 0:
            raise InvalidRequestError(f"--after is {self.after}.", "give 0 or more tokens.")
        if self.save is not None and self.save.exists():
            raise OutputExistsError(f"--save {self.save}: it exists.", "name another folder, or delete it.")


@dataclass(frozen=True)
class DebugReport:
    """What was compared, and what was found."""

    bundle: str  # name of the bundle that was looked at
    reference: str  # what it was compared with, in words
    role: str
    graph: GraphKind
    step: "CapturedStep"
    comparison: "Comparison"


def _require_packages(options: DebugOptions) -> None:
    """Check that what is needed is there; MissingDependencyError if not."""
    from importlib.util import find_spec

    needed = ("onnx", "onnx_ir", "onnxruntime", *(("polygraphy",) if options.save is not None else ()))
    if missing := [name for name in needed if find_spec(name) is None]:
        raise MissingDependencyError(
            f"`specexport debug` needs {describe_not_installed(missing)}.",
            make_install_hint("debug", "export", "cpu"),
        )


def _tolerance(entry: ModelEntry) -> float:
    return TOLERANCES[entry.dtype] if entry.approximation is None else get_limits(entry.approximation).tensor


def debug_bundle(folder: Path, prompt: str, options: DebugOptions, *, progress: Progress | None = None) -> DebugReport:
    """Decode after ``prompt`` up to the wanted step, and compare two graphs in it, or what two engines leave."""
    _require_packages(options)
    from specexport.debug.capture import capture_step
    from specexport.debug.compare import compare_engines, compare_graphs
    from specexport.debug.points import match_tensors
    from specexport.debug.save import save_graphs
    from specexport_runtime.bundle.opened import load_bundle
    from specexport_runtime.machine import available_cores

    clock = StageClock(progress, num_steps=4 + (options.save is not None))
    with clock.stage("load"):
        bundle = source = load_bundle(folder, max_num_seqs=1)
        manifest = bundle.manifest
        other_manifest = manifest if options.against is None else load_manifest(options.against)
        entry = _entry(manifest, folder, options)
        other = _entry(other_manifest, None if options.against else folder, options)
        _check_same_checkpoint(folder, entry, options, other)
        tolerance = options.tolerance or max(map(_tolerance, (entry, other)))
    graphs = None
    if entry.backend == BACKEND:
        with clock.stage("read", options.role):
            # Without another bundle, the engine's own graph is the reference.
            kind: GraphKind = options.graph if options.against is not None else "engine"
            graphs = _load(options.against or folder, other, kind), _load(folder, entry, options.graph)
    else:
        source = _engine_reference(bundle, entry, options)
        clock.skip(1)  # no graph is read
    threads = options.num_threads or available_cores()
    with clock.stage("decode", options.role, f"to a {options.step} step"):
        tokens = _tokens(bundle, prompt, options.role)
        # The cache rows hold what this decode needs, and no more: they are inputs of every run.
        needed = min(source.max_model_len, len(tokens) + options.after + source.manifest.lookahead + 1)
        source = source._replace(max_model_len=needed)
        step = capture_step(source, options.role, tokens, options.step, after=options.after, num_threads=threads)
    same_names = all(manifest.tools.get(name) == other_manifest.tools.get(name) for name in _TRACING)
    if options.save is not None and graphs is not None:
        with clock.stage("save"):
            pairs = match_tensors(*graphs, same_names=same_names)
            names = [pair.reference.name for pair in pairs], [pair.name for pair in pairs]
            saved = dict(zip(("reference", "debugged"), zip(graphs, names, strict=True), strict=True))
            save_graphs(options.save, saved, step)
    with clock.stage("compare", options.role):
        if graphs is None:
            found = compare_engines(source, bundle, options.role, step, tolerance=tolerance, num_threads=threads)
        else:
            found = compare_graphs(
                *graphs,
                step,
                tolerance=tolerance,
                same_names=same_names,
                layers=options.layers,
                num_threads=threads,
                on_layer=lambda label, number, count: clock.note(f"{label} ({number} of {count})"),
            )
    what = "the engine's own graph" if options.against is None else f"bundle {other_manifest.name}"
    return DebugReport(manifest.name, what, options.role, options.graph, step, found)


def _engine_reference(bundle: "Bundle", entry: ModelEntry, options: DebugOptions) -> "Bundle":
    """The bundle that an engine without layers is held against."""
    from specexport_runtime.bundle.opened import load_bundle

    if options.save is not None or options.layers:
        raise InvalidRequestError(
            f"{bundle.folder}: an engine of {entry.backend} does not show its layers.",
            "leave out --save and --layer.",
        )
    assert options.against is not None  # noqa: S101 - _entry has seen it
    return load_bundle(options.against, max_num_seqs=1)


def _tokens(bundle: "Bundle", prompt: str, role: str) -> Sequence[int]:
    """The prompt in the tokens of a role's model."""
    from specexport_runtime.bundle.token_map import own_texts

    (tokens,) = own_texts(bundle.folder, bundle.manifest.models, role, [bundle.tokenizer.encode(prompt).ids])
    return tokens


def _entry(manifest: Manifest, folder: Path | None, options: DebugOptions) -> ModelEntry:
    """The model's entry in one of the bundles; ``folder`` is that of the bundle looked at, None for the other."""
    entry, where = manifest.models.get(options.role), folder or options.against
    if entry is None:
        raise InvalidRequestError(f"{where} has no {options.role} model.", f"leave out --role {options.role}.")
    has_traces = entry.backend in CACHE_BACKENDS and folder is not None and options.against is not None
    if entry.backend != BACKEND and not (has_traces and options.graph == "engine"):
        raise IncompatibleError(
            f"{where}: the {options.role} was built for {entry.backend}, whose engines do not show their layers.",
            f"build it with --backend {BACKEND}; a TensorRT engine can be held --against such a bundle.",
        )
    return entry


def _check_same_checkpoint(folder: Path, entry: ModelEntry, options: DebugOptions, other: ModelEntry) -> None:
    own, theirs = entry.source, other.source
    if own.sha256 != theirs.sha256:
        raise InvalidRequestError(
            f"--against {options.against}: its {options.role} was built from {theirs.name} ({theirs.sha256[:12]}), and "
            f"that of {folder} from {own.name} ({own.sha256[:12]}).",
            "give a bundle of the same checkpoint.",
        )


def _load(folder: Path, entry: ModelEntry, kind: GraphKind) -> "EngineGraph":
    from specexport.debug.graph import load_graph

    graph = {"engine": entry.engine, "padded": entry.engine.padded}[kind]
    if graph is None:
        without = "a model that keeps states has none" if entry.states else "a target built with --self-draft has none"
        hint = f"{without}: give --against a bundle of the same checkpoint." if kind == "padded" else "build it again."
        raise InvalidRequestError(f"{folder}: this model has no {kind} graph.", hint)
    return load_graph(folder / graph.path)
