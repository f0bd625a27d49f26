"""One model through the stages: load, reference, trace, passes, lower, build, check."""

import gc
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.atomic import require_space
from specexport.backends.base import AUTO_MODEL_LEN, Backend, BuildJob, release_weights
from specexport.backends.registry import BACKENDS, find_backend
from specexport.channel_ranges import CacheRange, ChannelRanges
from specexport.compile.built import BuiltModel
from specexport.compile.check import check_engine, check_obstacle, check_sequences, text_perplexity, text_sequences
from specexport.compile.draft_cuts import (
    HeadCut,
    LayerPrune,
    check_num_layers,
    cut_pieces,
    rank_head_ids,
    read_counting_texts,
)
from specexport.compile.draft_trial import Chosen, DraftForm, DraftTrial, FormChoice, HeadSizes, describe_trial
from specexport.compile.lora import bind_adapters, describe_adapters
from specexport.progress import StageClock
from specexport.recipe import KEEP, BuildRecipe, model_dtype, resolve_recipe, rounding, with_quantization
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.arrays import LM_HEAD_IDS_NAME
from specexport_runtime.bundle.entry import (
    AttentionEntry,
    CutLmHead,
    DroppedLayer,
    EngineEntry,
    ExpertSizes,
    ModelEntry,
    Parameters,
    Rope,
    SourceEntry,
    WeightFormat,
)
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.quant_kinds import INT8, KINDS, passes_of
from specexport_runtime.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from specexport_runtime.executors.base import Float32Array, Int32Array, Int64Array

if TYPE_CHECKING:
    from specexport.checkpoint.lora import LoraSource
    from specexport.passes.block_weight import BlockWeight
    from specexport.trace.layers import FeatureRequest

STAGES = ("load", "reference", "trace", "passes", "lower", "build", "check")

_NEEDED = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "huggingface_hub")
CALIBRATION_PIECES, CALIBRATION_LEN = 16, 64
"""1,024 tokens from all over the texts."""
_SPACE_MARGIN = 1.05  # graph, tokenizer and alignment beside the weights


class _Reference(NamedTuple):
    """Token sequences and the eager logits for them: all that is kept of the torch model for the check."""

    sequences: Sequence[Int64Array]
    logits: Sequence[Float32Array]
    adapted: Sequence[Sequence[Float32Array]] = ()
    """The same with each adapter that requests may choose."""


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


class Reductions(NamedTuple):
    """What a draft is cut down by."""

    cut: HeadCut | None = None  # of its LM head; None leaves it whole
    prune: LayerPrune | None = None  # of its layers; None keeps all
    trial: DraftTrial | None = None  # finds out what else becomes of it; None builds what the recipe says


WHOLE = Reductions()


def build_model(
    recipe: BuildRecipe,  # ``"auto"`` allowed
    source: ModelSource,
    folder: Path,  # where the engine files go; created
    *,
    clock: StageClock,
    dump_dir: Path | None = None,  # where to write the graph after each pass, if anywhere
    reductions: Reductions = WHOLE,
    features: "FeatureRequest | None" = None,  # what a target gives to a draft head; None for nothing
) -> BuiltModel:
    """Build one engine.

    Raises CheckpointError, UnsupportedModelError or RecipeError if the checkpoint cannot be used, or not with this
    recipe, and CheckFailedError if the engine's logits differ from eager transformers.
    """
    with clock.stage("load", source.role, source.name):
        checkpoint = load_source(
            recipe, source, stream=reductions.prune is None
        )  # pruning runs the model again and again
        recipe = resolve_for(recipe, checkpoint)
        if checkpoint.rope is not None:
            clock.note(f"{checkpoint.rope.text}, for sequences of up to {checkpoint.rope.max_len} tokens")
        if recipe.quantization_of(source.role) == KEEP and not checkpoint.kept:  # a GGUF file of float weights
            recipe = with_quantization(recipe, source.role, None)
        adapters = bind_adapters(checkpoint, source.adapters, merge=not recipe.chooses_adapters)
        if adapters.all and not recipe.chooses_adapters:
            _round(checkpoint, recipe, source.role)  # weights are sums by now
        rounded = rounding(recipe, source.role)
        if rounded is not None:
            clock.note(f"weights are rounded to {rounded}; activations and KV caches are {model_dtype(recipe)}")
        head_ids, trial = _head_ids(checkpoint, reductions.cut), reductions.trial
        form = DraftForm(recipe.quantization_of(source.role), head_ids)
        others = () if trial is None else trial.others(_kept_share(checkpoint), recipe.backend)
        each = [with_quantization(recipe, source.role, name) for name in (form.quantize, *others)]
        require_space(folder, sum(_needed_bytes(one, checkpoint, source.role) for one in each))
    dropped = _drop_layers(checkpoint, reductions.prune, source.role, clock)
    with clock.stage("reference", source.role):
        obstacle = check_obstacle(recipe)
        references = {
            on_texts: _eager_reference(checkpoint, adapters.chosen, on_texts=on_texts)
            for on_texts in {_is_approximate(one, source.role) for one in each if obstacle is None}
        }
        if recipe.check and model_dtype(recipe) == "float16":
            _refuse_overflow(checkpoint, next(iter(references.values()), None))
    head, formats = _head_sizes(checkpoint), _weight_formats(checkpoint)
    ranges, cached = _calibrate(checkpoint, each, source.role, clock)
    forms = _Forms(recipe, source, checkpoint, adapters, dropped, dump_dir, head, formats, ranges, cached)
    forms = forms._replace(traced=_trace(checkpoint, source.role, clock, recipe, features))
    entry = forms.build(form, folder, clock, last=trial is None)
    if trial is not None:
        with clock.stage("trial", source.role, steps=0):
            rank = partial(_rank_ids, checkpoint)
            form, entry = FormChoice(trial, Chosen(form, entry), others, folder, forms.build, head, rank).settle()
            clock.note(describe_trial(entry)[0])
    del forms
    gc.collect()  # the graph is gone: its weights must not be in memory beside the check's
    reference = references.get(entry.approximation is not None)
    if reference is not None and form.head_ids is not None:
        reference = reference._replace(logits=[logits[:, form.head_ids] for logits in reference.logits])
    with clock.stage("check", source.role, obstacle or ""):
        found = check_engine(folder, entry, *reference) if reference is not None else None
        if found is not None and reference is not None and entry.approximation is not None and form.head_ids is None:
            perplexity = text_perplexity(checkpoint.tokenizer_json, reference.sequences, reference.logits)
            found = found._replace(perplexity=perplexity)
    return BuiltModel(
        entry=entry,
        files=hash_files(folder, [path.name for path in folder.iterdir()]),
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        special_tokens=dict(checkpoint.special_tokens),
        bos_token_id=checkpoint.bos_token_id,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
        check=found,
    )


class _Forms(NamedTuple):
    """What builds a model in one form or another, from a graph that is traced once."""

    recipe: BuildRecipe
    source: ModelSource
    checkpoint: Any
    adapters: Any
    dropped: tuple[DroppedLayer, ...]
    dump_dir: Path | None
    head: HeadSizes
    formats: tuple[WeightFormat, ...]
    ranges: Mapping[str, ChannelRanges] | None
    cached: Sequence[CacheRange] | None
    traced: "_Traced | None" = None

    def build(self, form: DraftForm, place: Path, clock: StageClock, *, last: bool = False) -> ModelEntry:
        """Files and entry of a form; the last uses the graph up."""
        assert self.traced is not None  # noqa: S101
        role, checkpoint, traced = self.source.role, self.checkpoint, self.traced
        recipe = with_quantization(self.recipe, role, form.quantize)
        job = BuildJob(
            recipe, role, traced.layers, checkpoint.num_parameters, checkpoint.max_positions, place, clock,
            cache_ranges=self.cached, states=traced.states, adapters=self.adapters.products,
        )  # fmt: skip
        _check_states(job, find_backend(recipe.backend))
        compiled = compile_graph(
            traced.ir_model if last else traced.ir_model.clone(),
            recipe,
            job,
            self.dump_dir,
            head_ids=form.head_ids,
            ranges=self.ranges if _weighs_inputs(recipe, role) else None,
            kept=checkpoint.kept if form.quantize == KEEP else None,
        )
        engine, rope, dtype = compiled.engine, checkpoint.rope, model_dtype(recipe)
        return ModelEntry(
            backend=recipe.backend,
            dtype=dtype,
            vocab_size=checkpoint.vocab_size,
            max_positions=checkpoint.max_positions,
            source=SourceEntry(self.source.name, self.source.sha256, checkpoint.architecture),
            parameters=Parameters(checkpoint.num_parameters, self.head.step(form.head_ids), compiled.experts),
            attention=AttentionEntry(
                traced.layers, recipe.kv_cache_dtype or dtype, self.head.num_heads, traced.windows
            ),
            engine=replace(engine, weight_formats=self.formats) if form.quantize == KEEP else engine,
            states=traced.states,
            quantize=form.quantize,
            passes=compiled.passes,
            rope=None if rope is None else Rope(rope.text, rope.max_len),
            dropped_layers=self.dropped,
            cut_lm_head=save_lm_head_ids(place, form.head_ids),
            adapters=describe_adapters(self.adapters.all, chosen=recipe.chooses_adapters),
        )


def save_lm_head_ids(folder: Path, ids: Int32Array | None) -> CutLmHead | None:
    """Write the token ids that an LM head was cut down to beside its engine; None where it is whole."""
    if ids is None:
        return None
    np.save(folder / LM_HEAD_IDS_NAME, ids, allow_pickle=False)
    return CutLmHead(LM_HEAD_IDS_NAME, len(ids))


def _head_sizes(checkpoint: Any) -> HeadSizes:
    """What a step's cost can be told from, whatever the LM head keeps."""
    from specexport.checkpoint.stored import WEIGHT_PREFIX

    model = checkpoint.model
    table, head = _tables(model)
    step = checkpoint.num_parameters - (0 if table is head else table.numel())
    config = model.config.get_text_config().to_dict()  # one of several sizes is no attribute
    heads = config.get("num_attention_heads")
    names = [WEIGHT_PREFIX + name for name, weight in model.named_parameters(remove_duplicate=False) if weight is head]
    kept = next((checkpoint.kept[name] for name in names if name in checkpoint.kept), None)
    return HeadSizes(
        step_parameters=step,
        num_heads=heads if isinstance(heads, int) and heads > 0 else None,
        rows=head.shape[0],
        width=head.shape[1],
        tied=table is head,
        kept_bytes=None if kept is None else kept.stored_bytes / head.numel(),
    )


def _kept_share(checkpoint: Any) -> float | None:
    """Bytes of a weight as the checkpoint has it; None where it holds float weights."""
    formats = _weight_formats(checkpoint)
    return sum(each.num_bytes for each in formats) / sum(each.weights for each in formats) if formats else None


def _needed_bytes(recipe: BuildRecipe, checkpoint: Any, role: str) -> int:
    """What the engines of a model take on disk, about."""
    copies = 1 + len(recipe.sm)  # the graph, and an engine for each architecture
    item, quantize = ITEM_BYTES[recipe.dtype], recipe.quantization_of(role)
    tables = {id(table): table.numel() for table in _tables(checkpoint.model)}
    outside = 0 if quantize is None or recipe.quantize_lm_head else sum(tables.values())
    size = float(item * outside)
    if quantize == KEEP:
        kept = {id(weight): weight for weight in checkpoint.kept.values()}.values()
        stored = sum(weight.shape[0] * weight.shape[1] for weight in kept)
        size += sum(weight.stored_bytes for weight in kept) + item * (checkpoint.num_parameters - stored)
    else:
        kind = None if quantize is None else KINDS[quantize]
        each = item if kind is None else kind.stored_bytes
        of_table, held = item if kind is None else INT8.stored_bytes, sum(tables.values()) - outside
        size += of_table * held + each * (checkpoint.num_parameters - held - outside)
        if each < of_table and len(tables) == 1:  # a large tied LM head has codes of its own
            size += each * held
    return int(size * copies * _SPACE_MARGIN)


def _tables(model: Any) -> list[Any]:
    """The embedding's weight and the LM head's, which may be the same."""
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def _weight_formats(checkpoint: Any) -> tuple[WeightFormat, ...]:
    """Each format that is kept, the most weights first."""
    found: dict[str, tuple[int, int]] = {}
    for weight in {id(weight): weight for weight in checkpoint.kept.values()}.values():  # a tied one counts once
        count, size = found.get(weight.kind, (0, 0))
        found[weight.kind] = count + weight.shape[0] * weight.shape[1], size + weight.stored_bytes
    return tuple(sorted((WeightFormat(kind, *sizes) for kind, sizes in found.items()), key=lambda each: -each.weights))


def load_source(recipe: BuildRecipe, source: ModelSource, *, stream: bool = True) -> Any:
    """Load a checkpoint as a recipe wants it.

    Raises CheckpointError or UnsupportedModelError if it cannot be used, or changed since it was hashed, and
    RecipeError if it does not support the recipe's max_model_len.
    """
    from specexport.checkpoint import hold_length, load_checkpoint
    from specexport.trace.refuse import check_config

    checkpoint = load_checkpoint(
        source.source,
        dtype=model_dtype(recipe),
        revision=source.revision,
        trust_remote_code=recipe.trust_remote_code,
        keep=recipe.quantization_of(source.role) == KEEP,
        stream=stream,
    )
    if checkpoint.source_sha256 != source.sha256:
        raise CheckpointError(f"checkpoint {source.name} changed while it was read.", "build again.")
    _round(checkpoint, recipe, source.role)
    hold_length(checkpoint, int(resolve_for(recipe, checkpoint).max_model_len))
    check_config(checkpoint.model)  # before it is run
    return checkpoint


def _round(checkpoint: Any, recipe: BuildRecipe, role: str) -> None:
    from specexport.checkpoint import round_weights

    rounded = rounding(recipe, role)
    if rounded is not None:
        round_weights(checkpoint, rounded)


def resolve_for(recipe: BuildRecipe, checkpoint: Any) -> BuildRecipe:
    """The recipe for one model; ``auto`` becomes a length for which no rotary table depends on the length.

    Raises RecipeError if max_model_len is larger than the model supports.
    """
    plain = [checkpoint.plain_positions] if recipe.max_model_len == "auto" else []
    return resolve_recipe(recipe, [checkpoint.max_positions, *plain])


def _refuse_overflow(checkpoint: Any, reference: _Reference | None) -> None:
    """Refuse a model whose activations exceed float16. No GPU is needed to find out, and no engine to be built."""
    found = reference or _eager_reference(checkpoint)
    if not all(np.isfinite(logits).all() for logits in found.logits):
        raise UnsupportedModelError(
            f"{checkpoint.architecture} cannot be computed in float16: activations exceed its range, and logits are no "
            "finite numbers in eager transformers either.",
            "use --dtype bfloat16.",
        )


def _is_approximate(recipe: BuildRecipe, role: str) -> bool:
    """Whether an engine computes another function than its checkpoint; see ``ModelEntry.approximation``."""
    return recipe.quantization_of(role) is not None or recipe.kv_cache_dtype is not None


def _eager_reference(checkpoint: Any, adapters: Sequence[Any] = (), *, on_texts: bool = False) -> _Reference:
    from specexport.checkpoint import with_adapter
    from specexport.trace import reference_logits

    if on_texts:
        sequences = text_sequences(checkpoint.tokenizer_json, checkpoint.vocab_size, checkpoint.max_positions)
    else:
        sequences = check_sequences(checkpoint.vocab_size)
    texts = [ids.tolist() for ids in sequences]
    adapted = []
    for adapter in adapters:
        with with_adapter(checkpoint, adapter) as changed:
            adapted.append(reference_logits(changed, texts))
    return _Reference(sequences, reference_logits(checkpoint, texts), adapted)


def _drop_layers(checkpoint: Any, prune: LayerPrune | None, role: str, clock: StageClock) -> tuple[DroppedLayer, ...]:
    """Take out the layers that do least."""
    if prune is None:
        return ()
    num_layers = checkpoint.model.config.get_text_config().num_hidden_layers
    check_num_layers(prune.num_layers, num_layers)
    if prune.num_layers == num_layers:
        return ()
    from specexport.trace import choose_layers, drop_layers

    with clock.stage("layers", role, f"{prune.num_layers} of {num_layers} stay", steps=0):
        pieces = cut_pieces(
            prune.texts, checkpoint.tokenizer_json, checkpoint.vocab_size, max_positions=checkpoint.max_positions
        )
        dropped = choose_layers(checkpoint, num_layers - prune.num_layers, pieces)
        drop_layers(checkpoint, [layer for layer, _ in dropped])
    return tuple(DroppedLayer(*each) for each in dropped)


def reads_texts(recipe: BuildRecipe, role: str) -> bool:
    """Whether a model's engine depends on the built-in texts: something of it was measured on them."""
    return _weighs_inputs(recipe, role) or recipe.kv_cache_dtype is not None


def _weighs_inputs(recipe: BuildRecipe, role: str) -> bool:
    """Whether weights are rounded by what the inputs of a layer make of an error."""
    form = passes_of(recipe.quantization_of(role), recipe.backend)
    return form is not None and form.weighs_inputs


def _calibrate(
    checkpoint: Any, recipes: Sequence[BuildRecipe], role: str, clock: StageClock
) -> tuple[Mapping[str, ChannelRanges] | None, Sequence[CacheRange] | None]:
    """How large the inputs of linear layers get, and keys and values; each None where no form needs to know it."""
    recipe = recipes[0]
    if not any(reads_texts(one, role) for one in recipes):
        return None, None
    from specexport.trace import activation_ranges, cache_ranges

    ranges, cached = None, None
    with clock.stage("calibrate", role, steps=0):
        pieces = cut_pieces(
            read_counting_texts(None),
            checkpoint.tokenizer_json,
            checkpoint.vocab_size,
            max_positions=checkpoint.max_positions,
            num_pieces=CALIBRATION_PIECES,
            piece_len=CALIBRATION_LEN,
        )
        if any(_weighs_inputs(one, role) for one in recipes):
            ranges = activation_ranges(checkpoint, pieces)
        if recipe.kv_cache_dtype is not None:
            longest = max(AUTO_MODEL_LEN, int(recipe.max_model_len))
            max_len = min(longest, checkpoint.max_positions or longest)
            cached = cache_ranges(checkpoint, pieces, max_len=max_len)
    return ranges, cached


def _head_ids(checkpoint: Any, cut: HeadCut | None) -> Int32Array | None:
    """Token ids that the LM head keeps; None if it keeps all."""
    if cut is None or cut.size == checkpoint.vocab_size:
        return None
    return np.sort(_rank_ids(checkpoint, cut)[: cut.size])


def _rank_ids(checkpoint: Any, cut: HeadCut) -> Int32Array:
    """All token ids, those first that stay in the LM head."""
    ends = [token for token in (checkpoint.bos_token_id, *checkpoint.eos_token_ids) if token is not None]
    return rank_head_ids(
        cut,
        checkpoint.tokenizer_json,
        checkpoint.vocab_size,
        keep=ends,
        special_tokens=list(checkpoint.special_tokens.values()),
    )


class _Traced(NamedTuple):
    """A traced graph, and what it has."""

    ir_model: Any
    layers: tuple[Any, ...]
    states: tuple[Any, ...]
    windows: Any


def _trace(
    checkpoint: Any, role: str, clock: StageClock, recipe: BuildRecipe, features: "FeatureRequest | None"
) -> _Traced:
    """Trace a checkpoint; its torch model is gone afterwards."""
    from specexport.trace import trace_checkpoint

    with clock.stage("trace", role):
        traced = trace_checkpoint(checkpoint, features, group_experts=find_backend(recipe.backend).groups_experts)
        # A copy of the graph (not of the weights): the exporter's own still refers to tied weights it has dropped.
        found = _Traced(traced.ir_model.clone(), tuple(traced.layers), traced.states, traced.windows)
        del traced, checkpoint.model  # the graph holds the weights now
        gc.collect()
    return found


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
    *,
    head_ids: Int32Array | None = None,  # the last three are for the passes, see ``passes.pipeline.default_passes``
    ranges: Mapping[str, ChannelRanges] | None = None,
    kept: "Mapping[str, BlockWeight] | None" = None,
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
            backend=backend.name,
            head_ids=head_ids,
            ranges=ranges,
            kept=kept,
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


def require_export_stack(backend: Backend | None = None) -> None:
    """Raise a MissingDependencyError unless the compiler's dependencies are installed; none is imported.

    None for ``backend`` takes the first there is.
    """
    backend = backend or next(iter(BACKENDS.values()))
    missing = [name for name in (*_NEEDED, *backend.modules) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"building needs {', '.join(missing)}, which is not installed.",
            f"pip install 'specexport[export,{backend.extra}]'.",
        )
