"""A target or a draft as a part of a bundle: what is read of its checkpoint, measured, traced and checked."""

import gc
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.atomic import require_space
from specexport.backends.base import AUTO_MODEL_LEN, Backend, BuildJob, PartRecipe
from specexport.backends.registry import BACKENDS, find_backend
from specexport.channel_ranges import CacheRange, ChannelRanges
from specexport.compile.built import EngineCheck
from specexport.compile.check import (
    build_check_sequences,
    build_text_sequences,
    check_engine,
    compute_text_perplexity,
    find_unchecked_reason,
)
from specexport.compile.draft_cuts import (
    NUM_PIECES,
    PIECE_LEN,
    HeadCut,
    LayerPrune,
    check_num_layers,
    cut_pieces,
    rank_head_ids,
    read_counting_texts,
)
from specexport.compile.draft_trial import ChosenForm, DraftForm, DraftTrial, FormChoice, HeadSizes
from specexport.compile.lora import bind_adapters, describe_adapters
from specexport.compile.part import ModelSource, Part, TokenizerData, TracedPart, make_entry_factory, weighs_inputs
from specexport.compile.token_map import SharedTokens, VocabularySide, describe_share, find_shared, make_vocabulary_side
from specexport.progress import StageClock
from specexport.recipe import FLOAT, FULL, KEEP, NO_CHECK, resolve_model_len
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.entry import AttentionEntry, DroppedLayer, Parameters, Rope, WeightFormat
from specexport_runtime.bundle.quant_kinds import INT8, KINDS
from specexport_runtime.errors import (
    CheckpointError,
    MissingDependencyError,
    UnsupportedModelError,
    describe_not_installed,
    make_install_hint,
)
from specexport_runtime.executors.base import Float32Array, Int32Array, Int64Array

if TYPE_CHECKING:
    from specexport.checkpoint.loaded import Checkpoint
    from specexport.trace.layers import FeatureRequest

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


class Reductions(NamedTuple):
    """What a draft is cut down by."""

    cut: HeadCut | None = None  # of its LM head; None leaves it whole
    prune: LayerPrune | None = None  # of its layers; None keeps all
    trial: DraftTrial | None = None  # finds out what else becomes of it; None builds what the recipe says
    beside: VocabularySide | None = None  # the vocabulary of its target; None for a model that has none

    def key(self) -> dict[str, Any]:
        """What of it decides an engine, beside the target."""
        parts = {"cut": self.cut, "prune": self.prune, "trial": self.trial}
        return {name: part.key() for name, part in parts.items() if part is not None}


WHOLE = Reductions()


def prepare_model(
    recipe: PartRecipe,
    source: ModelSource,
    folder: Path,  # where the engine files go; created
    clock: StageClock,
    *,
    reductions: Reductions = WHOLE,
    features: "FeatureRequest | None" = None,  # what a target gives to a draft head; None for nothing
    checkpoint: "Checkpoint | None" = None,  # of the source, if it was loaded already; used up
) -> Part:
    """Load a target or a draft, run it in torch, and trace it; errors name what the recipe cannot use."""
    from specexport.trace.check import trace_checkpoint

    (cut, prune, trial, beside), role = reductions, source.role
    with clock.stage("load", role, source.name):
        if checkpoint is None:
            checkpoint = load_source(recipe, source, stream=prune is None)  # pruning runs the model again and again
        if checkpoint.rope is not None:
            clock.note(f"{checkpoint.rope.text}, for sequences of up to {checkpoint.rope.max_len} tokens")
        quantize, max_len = _quantize(recipe, checkpoint), resolve_max_len(recipe, checkpoint)
        adapters = bind_adapters(checkpoint, source.adapters, merge=not recipe.chooses_adapters)
        if adapters.all and not recipe.chooses_adapters:
            _round_weights(checkpoint, recipe)  # weights are sums by now
        rounded = recipe.rounding(quantize)
        if rounded is not None:
            clock.note(f"weights are rounded to {rounded}; activations and KV caches are {recipe.model_dtype}")
        shared = (
            None
            if beside is None
            else find_shared(beside, make_vocabulary_side(checkpoint, source.name, checkpoint.vocab_size))
        )
        if shared is not None:
            clock.note(f"another vocabulary than the target's: they share {describe_share(shared.entry)}")
            trial = None if trial is None else trial._replace(shared=shared)
        form = DraftForm(quantize, _choose_head_ids(checkpoint, cut, shared))
        others = () if trial is None else trial.others(_compute_kept_bytes(checkpoint), recipe.backend)
        kinds = (quantize, *others)
        require_space(folder, sum(_needed_bytes(recipe, kind, checkpoint) for kind in kinds))
    dropped = _drop_layers(checkpoint, prune, role, clock)
    with clock.stage("reference", role):
        obstacle = find_unchecked_reason(recipe)
        references = {
            on_texts: _eager_reference(checkpoint, adapters.chosen, on_texts=on_texts, full=recipe.check == FULL)
            for on_texts in {recipe.has_small_caches or kind is not None for kind in kinds if obstacle is None}
        }
        if recipe.check != NO_CHECK and recipe.model_dtype == "float16":
            _refuse_overflow(checkpoint, next(iter(references.values()), None))
    sizes, formats, rope = _head_sizes(checkpoint), _weight_formats(checkpoint), checkpoint.rope
    if shared is not None:
        sizes = sizes.only(shared.head_ids)
    ranges, cached = _calibrate(checkpoint, recipe, kinds, max_len, clock)
    with clock.stage("trace", role):
        traced = trace_checkpoint(checkpoint, features, group_experts=find_backend(recipe.backend).groups_experts)
        if traced.whole is not None:
            clock.note(f"all layers are traced: {traced.whole}")
        # A copy of the graph (not of the weights): the exporter's own still refers to tied weights it has dropped.
        traced = traced._replace(ir_model=traced.ir_model.clone())
        del checkpoint.model  # the graph holds the weights now
        gc.collect()
    count, positions, ends = checkpoint.num_parameters, checkpoint.max_positions, tuple(checkpoint.eos_token_ids)
    texts = TokenizerData(
        checkpoint.tokenizer_json, checkpoint.chat_template, checkpoint.special_tokens, checkpoint.bos_token_id, ends
    )
    job = BuildJob(
        recipe, quantize, max_len, traced.layers, count, positions, folder, clock,
        cache_ranges=cached, states=traced.states, adapters=adapters.products,
    )  # fmt: skip
    entry = make_entry_factory(
        source,
        job,
        checkpoint.architecture,
        vocab_size=checkpoint.vocab_size,
        attention=AttentionEntry(traced.layers, recipe.kv_cache_dtype, sizes.num_heads, traced.windows),
        rope=None if rope is None else Rope(rope.text, rope.max_len),
        dropped_layers=dropped,
        adapters=describe_adapters(adapters.all, chosen=recipe.chooses_adapters),
    )
    return Part(
        source,
        form,
        TracedPart(traced.ir_model, job, ranges, checkpoint.kept),
        check=partial(_check_model, references, texts.tokenizer_json, recipe.check == FULL),
        texts=texts,
        entry=entry,
        parameters=lambda ids: Parameters(count, sizes.step(ids)),
        kept_formats=formats,
        choice=None if trial is None else FormChoice(trial, others, sizes, partial(_rank_ids, checkpoint, shared)),
        shared=shared,
    )


def _check_model(
    references: Mapping[bool, _Reference], tokenizer_json: bytes, full: bool, folder: Path, chosen: ChosenForm
) -> EngineCheck | None:
    ids, entry = chosen.form.head_ids, chosen.entry
    reference = references.get(entry.approximation is not None)
    if reference is None:
        return None
    if ids is not None:
        reference = reference._replace(logits=[logits[:, ids] for logits in reference.logits])
    found = check_engine(folder, entry, *reference, full=full)
    if entry.approximation is not None and ids is None:
        found = found._replace(
            perplexity=compute_text_perplexity(tokenizer_json, reference.sequences, reference.logits)
        )
    return found


def _head_sizes(checkpoint: "Checkpoint") -> HeadSizes:
    """What a step's cost can be told from, whatever the LM head keeps."""
    from specexport.checkpoint.stored import WEIGHT_PREFIX

    model = checkpoint.model
    table, head = table_weights(model)
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


def _compute_kept_bytes(checkpoint: "Checkpoint") -> float | None:
    """Bytes of a weight as the checkpoint has it; None where it holds float weights."""
    formats = _weight_formats(checkpoint)
    return sum(each.num_bytes for each in formats) / sum(each.weights for each in formats) if formats else None


def _needed_bytes(recipe: PartRecipe, quantize: str | None, checkpoint: "Checkpoint") -> int:
    """What the engines of a form take on disk, about."""
    copies = 1 + len(recipe.sm)  # the graph, and an engine for each architecture
    item = ITEM_BYTES[recipe.dtype]
    tables = {id(table): table.numel() for table in table_weights(checkpoint.model)}
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


def table_weights(model: Any) -> list[Any]:
    """The embedding's weight and the LM head's, which may be the same."""
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def _weight_formats(checkpoint: "Checkpoint") -> tuple[WeightFormat, ...]:
    """Each format that is kept, the most weights first."""
    found: dict[str, tuple[int, int]] = {}
    for weight in {id(weight): weight for weight in checkpoint.kept.values()}.values():  # a tied one counts once
        count, size = found.get(weight.kind, (0, 0))
        found[weight.kind] = count + weight.shape[0] * weight.shape[1], size + weight.stored_bytes
    return tuple(sorted((WeightFormat(kind, *sizes) for kind, sizes in found.items()), key=lambda each: -each.weights))


def load_source(recipe: PartRecipe, source: ModelSource, *, stream: bool = True) -> "Checkpoint":
    """Load a checkpoint as a recipe wants it; CheckpointError if it changed since it was hashed."""
    from specexport.checkpoint.lengths import freeze_length
    from specexport.checkpoint.load import load_checkpoint
    from specexport.trace.refuse import check_config

    checkpoint = load_checkpoint(
        source.source,
        dtype=recipe.model_dtype,
        revision=source.revision,
        trust_remote_code=recipe.trust_remote_code,
        keep=recipe.quantize == KEEP,
        stream=stream,
    )
    if checkpoint.source_sha256 != source.sha256:
        raise CheckpointError(f"checkpoint {source.name} changed while it was read.", "build again.")
    _round_weights(checkpoint, recipe)
    freeze_length(checkpoint, resolve_max_len(recipe, checkpoint))
    check_config(checkpoint.model)  # before it is run
    return checkpoint


def _quantize(recipe: PartRecipe, checkpoint: "Checkpoint") -> str | None:
    """How the simplest form of a model is quantized; a GGUF file of float weights has none to keep."""
    return None if recipe.quantize == FLOAT or (recipe.quantize == KEEP and not checkpoint.kept) else recipe.quantize


def _round_weights(checkpoint: "Checkpoint", recipe: PartRecipe) -> None:
    from specexport.checkpoint.load import round_weights

    rounded = recipe.rounding(_quantize(recipe, checkpoint))
    if rounded is not None:
        round_weights(checkpoint, rounded)


def resolve_max_len(recipe: PartRecipe, checkpoint: "Checkpoint") -> int:
    """Most tokens of a sequence of one model; for ``auto`` no rotary table depends on the length."""
    plain = [checkpoint.plain_positions] if recipe.max_model_len == "auto" else []
    return resolve_model_len(recipe.max_model_len, [checkpoint.max_positions, *plain])


def _refuse_overflow(checkpoint: "Checkpoint", reference: _Reference | None) -> None:
    """Refuse a model whose activations exceed float16. No GPU is needed to find out, and no engine to be built."""
    found = reference or _eager_reference(checkpoint)
    if not all(np.isfinite(logits).all() for logits in found.logits):
        raise UnsupportedModelError(
            f"{checkpoint.architecture} cannot be computed in float16: activations exceed its range, and logits are no "
            "finite numbers in eager transformers either.",
            "use --dtype bfloat16.",
        )


def _eager_reference(
    checkpoint: "Checkpoint", adapters: Sequence[Any] = (), *, on_texts: bool = False, full: bool = False
) -> _Reference:
    from specexport.checkpoint.lora_fit import use_adapter
    from specexport.trace.check import compute_reference_logits

    if on_texts:
        known = checkpoint.tokenizer_json, checkpoint.vocab_size, checkpoint.max_positions
        sequences = build_text_sequences(*known, full=full)
    else:
        sequences = build_check_sequences(checkpoint.vocab_size)
    texts = [ids.tolist() for ids in sequences]
    adapted = []
    for adapter in adapters:
        with use_adapter(checkpoint, adapter) as changed:
            adapted.append(compute_reference_logits(changed, texts))
    return _Reference(sequences, compute_reference_logits(checkpoint, texts), adapted)


def _drop_layers(
    checkpoint: "Checkpoint", prune: LayerPrune | None, role: str, clock: StageClock
) -> tuple[DroppedLayer, ...]:
    """Take out the layers that do least."""
    if prune is None:
        return ()
    num_layers = checkpoint.model.config.get_text_config().num_hidden_layers
    check_num_layers(prune.num_layers, num_layers)
    if prune.num_layers == num_layers:
        return ()
    from specexport.trace.prune import choose_layers, drop_layers

    with clock.stage("layers", role, f"{prune.num_layers} of {num_layers} stay", steps=0):
        dropped = choose_layers(
            checkpoint, num_layers - prune.num_layers, cut_checkpoint_pieces(checkpoint, prune.texts)
        )
        drop_layers(checkpoint, [layer for layer, _ in dropped])
    return tuple(DroppedLayer(*each) for each in dropped)


def needs_calibration(recipe: PartRecipe) -> bool:
    """Whether a model's engine depends on the built-in texts: something of it was measured on them."""
    return weighs_inputs(recipe, recipe.quantize) or recipe.has_small_caches


def _calibrate(
    checkpoint: "Checkpoint", recipe: PartRecipe, kinds: Sequence[str | None], max_len: int, clock: StageClock
) -> tuple[Mapping[str, ChannelRanges] | None, Sequence[CacheRange] | None]:
    """How large the inputs of linear layers get, and keys and values; each None where no form needs to know it."""
    weighs = any(weighs_inputs(recipe, kind) for kind in kinds)
    if not weighs and not recipe.has_small_caches:
        return None, None
    from specexport.trace.calibrate import cache_ranges, measure_activation_ranges

    ranges, cached = None, None
    with clock.stage("calibrate", recipe.role, steps=0):
        pieces = cut_checkpoint_pieces(checkpoint, read_counting_texts(None), CALIBRATION_PIECES, CALIBRATION_LEN)
        if weighs:
            ranges = measure_activation_ranges(checkpoint, pieces)
        if recipe.has_small_caches:
            longest = max(AUTO_MODEL_LEN, max_len)
            cached = cache_ranges(checkpoint, pieces, max_len=min(longest, checkpoint.max_positions or longest))
    return ranges, cached


def cut_checkpoint_pieces(
    checkpoint: "Checkpoint", texts: Sequence[str], num_pieces: int = NUM_PIECES, piece_len: int = PIECE_LEN
) -> list[Int64Array]:
    """Pieces of texts that a checkpoint can read, see :func:`cut_pieces`."""
    known, room = (checkpoint.tokenizer_json, checkpoint.vocab_size), checkpoint.max_positions
    return cut_pieces(texts, *known, max_positions=room, num_pieces=num_pieces, piece_len=piece_len)


def _choose_head_ids(checkpoint: "Checkpoint", cut: HeadCut | None, shared: SharedTokens | None) -> Int32Array | None:
    """Token ids that the LM head keeps; None if it keeps all."""
    if cut is None or (shared is None and cut.size == checkpoint.vocab_size):
        return None if shared is None else shared.head_ids
    return np.sort(_rank_ids(checkpoint, shared, cut)[: cut.size])


def _rank_ids(checkpoint: "Checkpoint", shared: SharedTokens | None, cut: HeadCut) -> Int32Array:
    """All token ids that the LM head may have, those first that stay in it."""
    ends = [token for token in (checkpoint.bos_token_id, *checkpoint.eos_token_ids) if token is not None]
    if shared is not None:
        cut = cut._replace(ends=())  # they are ids of the target
    ranked = rank_head_ids(
        cut,
        checkpoint.tokenizer_json,
        checkpoint.vocab_size,
        keep=ends,
        special_tokens=list(checkpoint.special_tokens.values()),
    )
    return ranked if shared is None else ranked[np.isin(ranked, shared.head_ids)]


def require_export_stack(backend: Backend | None = None) -> None:
    """Raise a MissingDependencyError unless the compiler's dependencies are installed; none is imported."""
    backend = backend or next(iter(BACKENDS.values()))
    missing = [name for name in (*_NEEDED, *backend.modules) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"building needs {describe_not_installed(missing)}.", make_install_hint("export", backend.extra)
        )
