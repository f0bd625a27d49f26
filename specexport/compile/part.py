"""One part of a bundle through the stages: load, reference, trace, passes, lower, build, check.

A part is a target, a draft or a draft head. What differs between them is a :class:`Part`; all that they have in common
is here, once.
"""

import gc
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.backends.base import Backend, BuildJob, release_weights
from specexport.backends.registry import BACKENDS, find_backend
from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.check import check_obstacle
from specexport.compile.draft_trial import Chosen, DraftForm, MakeForm
from specexport.progress import StageClock
from specexport.recipe import BuildRecipe, model_dtype, with_quantization
from specexport_runtime.bundle.arrays import LM_HEAD_IDS_NAME, MASK_NAME
from specexport_runtime.bundle.entry import (
    AdapterEntry,
    AttentionEntry,
    CutLmHead,
    DraftHeadEntry,
    DroppedLayer,
    EngineEntry,
    ExpertSizes,
    ModelEntry,
    Parameters,
    Rope,
    SourceEntry,
)
from specexport_runtime.bundle.files import FileEntry, hash_files
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Float32Array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specexport.checkpoint.lora import LoraSource

STAGES = ("load", "reference", "trace", "passes", "lower", "build", "check")


class ModelSource(NamedTuple):
    """A checkpoint to build from, found and hashed."""

    role: str  # ``"target"``, ``"draft"`` or ``"head"``
    source: str  # checkpoint as it was given: a folder, a ``.gguf`` file or a hub id
    revision: str | None  # of the hub
    name: str  # for reports and the manifest; never a machine path
    sha256: str  # over its files
    quantized: bool = False  # it may hold quantized weights that can be kept
    adapters: "tuple[LoraSource, ...]" = ()  # of a target
    turns_by_length: bool = False  # it may have rotary tables that depend on the length
    weight_bytes: int = 0  # of its weights' files


class Traits(NamedTuple):
    """What a manifest says of a part beside its job and its engine."""

    architecture: str
    vocab_size: int  # V
    num_parameters: int  # tied ones counted once
    step_parameters: int  # see ``Parameters.step``
    query_heads: int | None  # of a layer; None if the checkpoint does not say
    windows: tuple[int, ...] = ()  # see ``AttentionEntry``, and for the next
    target_layers: tuple[int, ...] = ()
    rope: Rope | None = None
    dropped_layers: tuple[DroppedLayer, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    draft_head: DraftHeadEntry | None = None
    mask: Float32Array | None = None  # the feature for tokens not known yet, [E]; None where there is none


class Part(ABC):
    """What differs between the parts of a bundle; :func:`build_part` calls the methods in this order, each stage once.

    Attributes:
        recipe: ``"auto"`` allowed until it is loaded, then resolved.
        source: its checkpoint.
        tries: :meth:`choose` builds other forms of it.
    """

    tries = False

    def __init__(self, recipe: BuildRecipe, source: ModelSource) -> None:
        self.recipe = recipe
        self.source = source

    @abstractmethod
    def load(self, folder: Path, clock: StageClock) -> DraftForm:
        """Read the checkpoint and settle the recipe; the form to build first. ``folder`` is for its engines."""

    def reduce(self, clock: StageClock) -> None:
        """Take out what the engine is to be without."""
        del clock

    @abstractmethod
    def refer(self) -> None:
        """Compute in torch what the engine will be held to, where it can be checked."""

    def measure(self, clock: StageClock) -> None:
        """Measure what passes or lowerings must know."""
        del clock

    @abstractmethod
    def trace(self) -> Any:
        """Its graph, an ``ir.Model``; what it was traced from is in no memory afterwards."""

    @abstractmethod
    def job(self, recipe: BuildRecipe, form: DraftForm, folder: Path, clock: StageClock) -> BuildJob:
        """What becomes of the graph in a form, for which ``recipe`` is."""

    @abstractmethod
    def traits(self, form: DraftForm) -> Traits:
        """What its manifest says of it."""

    def choose(self, first: Chosen, folder: Path, clock: StageClock, make: MakeForm) -> Chosen:
        """The form that stays in ``folder``, where the first is now; ``make`` builds others."""
        del folder, clock, make
        return first

    @abstractmethod
    def check(self, folder: Path, chosen: Chosen) -> EngineCheck | None:
        """Hold the engine to :meth:`refer`; None if there is nothing to hold it to. CheckFailedError if it differs."""

    @abstractmethod
    def built(self, entry: ModelEntry, files: "Mapping[str, FileEntry]", check: EngineCheck | None) -> BuiltModel:
        """All that a bundle must know of it."""


def build_part(
    part: Part,
    folder: Path,  # where the engine files go; created
    *,
    clock: StageClock,
    dump_dir: Path | None = None,  # where to write the graph after each pass, if anywhere
) -> BuiltModel:
    """Build the engine of a part.

    Raises CheckpointError, UnsupportedModelError or RecipeError if the checkpoint cannot be used, or not with this
    recipe, and CheckFailedError if the engine computes something else than torch.
    """
    role = part.source.role
    with clock.stage("load", role, part.source.name):
        form = part.load(folder, clock)
    part.reduce(clock)
    with clock.stage("reference", role):
        part.refer()
    part.measure(clock)
    with clock.stage("trace", role):
        graph = part.trace()
    make = partial(_build_form, part, graph, dump_dir)
    first = Chosen(form, make(form, folder, clock, last=not part.tries))
    chosen = part.choose(first, folder, clock, make)
    del graph, make
    gc.collect()  # the graph is gone: its weights must not be in memory beside the check's
    with clock.stage("check", role, check_obstacle(part.recipe) or ""):
        found = part.check(folder, chosen)
    return part.built(chosen.entry, hash_files(folder, [path.name for path in folder.iterdir()]), found)


def _build_form(
    part: Part, graph: Any, dump_dir: Path | None, form: DraftForm, place: Path, clock: StageClock, *, last: bool
) -> ModelEntry:
    """Files and entry of a form; the last uses the graph up."""
    source, recipe = part.source, with_quantization(part.recipe, part.source.role, form.quantize)
    job, traits, dtype = part.job(recipe, form, place, clock), part.traits(form), model_dtype(recipe)
    _check_states(job, find_backend(recipe.backend))
    compiled = compile_graph(graph if last else graph.clone(), recipe, job, dump_dir)
    for name, array in ((LM_HEAD_IDS_NAME, form.head_ids), (MASK_NAME, traits.mask)):
        if array is not None:
            np.save(place / name, array, allow_pickle=False)
    return ModelEntry(
        backend=recipe.backend,
        dtype=dtype,
        vocab_size=traits.vocab_size,
        max_positions=job.max_positions,
        source=SourceEntry(source.name, source.sha256, traits.architecture),
        parameters=Parameters(traits.num_parameters, traits.step_parameters, compiled.experts),
        attention=AttentionEntry(
            job.layers,
            dtype if job.cache_ranges is None or recipe.kv_cache_dtype is None else recipe.kv_cache_dtype,
            traits.query_heads,
            traits.windows,
            traits.target_layers,
        ),
        engine=compiled.engine,
        states=job.states,
        quantize=form.quantize,
        passes=compiled.passes,
        rope=traits.rope,
        dropped_layers=traits.dropped_layers,
        cut_lm_head=None if form.head_ids is None else CutLmHead(LM_HEAD_IDS_NAME, len(form.head_ids)),
        draft_head=traits.draft_head,
        adapters=traits.adapters,
    )


def _check_states(job: BuildJob, backend: Backend) -> None:
    """Refuse layers that keep a state where nothing can go back behind drafts."""
    if job.states and not backend.has_states:
        able = ", ".join(name for name, each in BACKENDS.items() if each.has_states)
        raise UnsupportedModelError(
            f"backend {backend.name} has no layers that keep a state, and this model has {len(job.states)}.",
            f"build it for {able}.",
        )


class Compiled(NamedTuple):
    """Engine files, and what the passes found and did on the way to them."""

    engine: EngineEntry
    passes: tuple[tuple[str, int], ...]  # what each changed: name, changes
    experts: ExpertSizes | None


def compile_graph(
    ir_model: Any,
    recipe: BuildRecipe,  # resolved
    job: BuildJob,
    dump_dir: Path | None,
) -> Compiled:
    """A traced graph to engine files; its weights are let go."""
    from specexport.passes.experts_graph import expert_sizes
    from specexport.passes.pipeline import default_passes, run_passes

    backend, weights = find_backend(recipe.backend), list(ir_model.graph.initializers.values())
    backend.check_memory(job)
    with job.clock.stage("passes", job.role):
        passes = default_passes(
            model_dtype(recipe),
            pack=recipe.fuse and backend.packs_linear,
            quantize=recipe.quantization_of(job.role),
            quantize_lm_head=recipe.quantize_lm_head,
            quantize_operator=backend.quantize_operator,
            quantize_block=backend.quantize_block,
            head_ids=job.head_ids,
            ranges=job.input_ranges,
            kept=job.kept,
            adapters=job.adapters,
            own_operators=backend.own_operators,
        )
        done = run_passes(ir_model, passes, dump_dir=dump_dir, on_pass=job.clock.note)
    strip_metadata(ir_model)
    experts = expert_sizes(ir_model)
    engine = backend.build(ir_model, job)
    release_weights([*weights, *ir_model.graph.initializers.values()])
    return Compiled(engine, done, experts)


def strip_metadata(ir_model: Any) -> None:
    """Remove what the exporter notes beside nodes and values: stack traces with paths of this machine, half the file.

    Dumped passes keep it: it shows where a node came from.
    """
    import onnx_ir as ir

    for graph in (ir_model.graph, *ir_model.functions.values()):
        graph.metadata_props.clear()
        for value in graph.inputs:
            value.metadata_props.clear()
        for node in ir.traversal.RecursiveGraphIterator(graph):
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    for initializer in ir_model.graph.initializers.values():
        initializer.metadata_props.clear()
    ir_model.metadata_props.clear()
