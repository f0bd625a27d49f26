"""One part of a bundle from its graph to a checked engine: passes, lower, build, check.

A part is a target or a draft (``compile.model``), or a draft head (``compile.head``): they differ in how they are
loaded, referred to torch and traced, and in what :class:`Part` says of them.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.backends.base import Backend, BuildJob, PartRecipe, release_weights
from specexport.backends.registry import BACKENDS, find_backend
from specexport.channel_ranges import ChannelRanges
from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.check import find_unchecked_reason
from specexport.compile.draft_trial import ChosenForm, DraftForm, FormChoice, describe_trial
from specexport.compile.token_map import SharedTokens
from specexport.host import map_in_threads
from specexport.progress import StageClock
from specexport.recipe import KEEP
from specexport_runtime.bundle.arrays import LM_HEAD_IDS_NAME
from specexport_runtime.bundle.entry import (
    CutLmHead,
    EngineEntry,
    ExpertSizes,
    ModelEntry,
    Parameters,
    SourceEntry,
    WeightFormat,
)
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.quant_kinds import get_backend_passes
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Float32Array, Int32Array

if TYPE_CHECKING:
    from specexport.checkpoint.lora import LoraSource
    from specexport.passes.block_weight import BlockWeight

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
    is_module: bool = False  # it is an MTP module in the target's own checkpoint
    weight_bytes: int = 0  # of its weights' files
    texts_sha256: str = ""  # over what decides its tokenizer: all files but those of weights alone


class TokenizerData(NamedTuple):
    """What a bundle takes of a part's tokenizer; see ``BuiltModel``."""

    tokenizer_json: bytes
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = {}
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


class TracedPart(NamedTuple):
    """What a part's engines are made of."""

    graph: Any  # an ``ir.Model``, which is used up
    job: BuildJob  # of the first form
    ranges: Mapping[str, ChannelRanges] | None = None  # of inputs, by name of the weight, where int4 weighs errors
    kept: "Mapping[str, BlockWeight] | None" = None  # quantized weights of the checkpoint, for a form that keeps them


@dataclass
class Part:
    """A part that was loaded and traced: what its engine is built of, and what is said of it."""

    source: ModelSource
    form: DraftForm  # to build first
    traced: TracedPart | None  # None once it is used up
    check: Callable[
        [Path, ChosenForm], EngineCheck | None
    ]  # compares the engine in a folder with torch, where it can be
    texts: TokenizerData
    entry: Callable[..., ModelEntry]  # makes the entry of a form, with all that is the same of each
    parameters: Callable[[Int32Array | None], Parameters]  # with an LM head of these ids
    comes_cut: bool = False  # its LM head has its ids already
    arrays: Mapping[str, Float32Array] = field(default_factory=dict)  # what lies beside the engine, by file name
    kept_formats: tuple[WeightFormat, ...] = ()  # of the weights that are kept
    choice: FormChoice | None = None  # of a draft whose form is to be found out
    shared: SharedTokens | None = None  # of a draft with another vocabulary than its target's


def build_part(part: Part, dump_dir: Path | None = None) -> BuiltModel:
    """Build a part's engine and check it (CheckFailedError); ``dump_dir`` gets the graph after each pass."""
    assert part.traced is not None  # noqa: S101 - it was not built yet
    job, role = part.traced.job, part.source.role
    folder, clock = job.folder, job.clock
    make = partial(_build_form, part, dump_dir)
    chosen = ChosenForm(part.form, make(part.form, folder, clock, last=part.choice is None))
    if part.choice is not None:
        with clock.stage("trial", role, steps=0):
            chosen = part.choice.settle(chosen, folder, make)
            clock.note(describe_trial(chosen.entry)[0])
    part.traced = None
    gc.collect()  # the graph is gone: its weights must not be in memory beside the check's
    hashed = map_in_threads(partial(hash_files, folder), [[path.name for path in folder.iterdir()]])
    with clock.stage("check", role, find_unchecked_reason(job.recipe) or ""):
        found = part.check(folder, chosen)
    return BuiltModel(chosen.entry, next(hashed), found, *part.texts)


def _build_form(
    part: Part, dump_dir: Path | None, form: DraftForm, place: Path, clock: StageClock, *, last: bool = False
) -> ModelEntry:
    """Files and entry of a form; the last uses the graph up."""
    assert part.traced is not None  # noqa: S101 - the last form was not built yet
    traced, ids, keeps = part.traced, form.head_ids, form.quantize == KEEP
    job = traced.job._replace(quantize=form.quantize, folder=place, clock=clock)
    recipe = job.recipe
    _check_states(job, find_backend(recipe.backend))
    compiled = compile_graph(
        traced.graph if last else traced.graph.clone(),
        job,
        dump_dir,
        head_ids=None if part.comes_cut else ids,
        ranges=traced.ranges if weighs_inputs(recipe, form.quantize) else None,
        kept=traced.kept if keeps else None,
    )
    for name, array in {**part.arrays, **({} if ids is None else {LM_HEAD_IDS_NAME: ids})}.items():
        np.save(place / name, array, allow_pickle=False)
    if part.shared is not None:
        part.shared.tokens.save(place / part.shared.entry.path)
    return part.entry(
        parameters=part.parameters(ids)._replace(experts=compiled.experts),
        engine=replace(compiled.engine, weight_formats=part.kept_formats) if keeps else compiled.engine,
        quantize=form.quantize,
        passes=compiled.passes,
        cut_lm_head=None if ids is None else CutLmHead(LM_HEAD_IDS_NAME, len(ids)),
        token_map=None if part.shared is None else part.shared.entry,
    )


def make_entry_factory(
    source: ModelSource, job: BuildJob, architecture: str, **facts: Any
) -> Callable[..., ModelEntry]:
    """What makes the entries of a part's forms: with all that is known of it before one is built."""
    return partial(
        ModelEntry,
        backend=job.recipe.backend,
        dtype=job.recipe.model_dtype,
        max_positions=job.max_positions,
        source=SourceEntry(source.name, source.sha256, architecture),
        states=job.states,
        **facts,
    )


def weighs_inputs(recipe: PartRecipe, quantize: str | None) -> bool:
    """Whether weights are rounded by what the inputs of a layer make of an error."""
    form = get_backend_passes(quantize, recipe.backend)
    return form is not None and form.weighs_inputs


def _check_states(job: BuildJob, backend: Backend) -> None:
    """Refuse layers that keep a state where nothing can go back after drafts."""
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
    job: BuildJob,
    dump_dir: Path | None,
    *,
    head_ids: Int32Array | None = None,  # the last three are for the passes, see ``passes.pipeline.default_passes``
    ranges: Mapping[str, ChannelRanges] | None = None,
    kept: "Mapping[str, BlockWeight] | None" = None,
) -> Compiled:
    """A traced graph to engine files; its weights are let go."""
    from specexport.passes.experts_graph import expert_sizes
    from specexport.passes.pipeline import default_passes, run_passes

    recipe = job.recipe
    backend, weights = find_backend(recipe.backend), list(ir_model.graph.initializers.values())
    backend.check_memory(job)
    with job.clock.stage("passes", job.role):
        passes = default_passes(
            recipe.model_dtype,
            pack=recipe.fuse and backend.packs_linear,
            quantize=job.quantize,
            quantize_lm_head=recipe.quantize_lm_head,
            backend=backend.name,
            head_ids=head_ids,
            ranges=ranges,
            kept=kept,
            adapters=job.adapters,
            own_operators=backend.own_operators,
        )
        done = run_passes(ir_model, passes, dump_dir=dump_dir, on_pass=None if dump_dir is None else job.clock.note)
    strip_metadata(ir_model)
    experts = expert_sizes(ir_model)
    engine = backend.build(ir_model, job)
    release_weights([*weights, *ir_model.graph.initializers.values()])
    return Compiled(engine, done, experts)


def strip_metadata(ir_model: Any) -> None:
    """Remove the exporter's notes, stack traces with paths of this machine, which are half the file."""
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
