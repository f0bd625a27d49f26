"""A target or a draft as a part of a bundle: what is read of its checkpoint, measured, traced and checked."""

import gc
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.atomic import require_space
from specexport.backends.base import AUTO_MODEL_LEN, Backend, BuildJob
from specexport.backends.registry import BACKENDS, find_backend
from specexport.channel_ranges import CacheRange, ChannelRanges
from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.check import check_engine, check_obstacle, check_sequences, text_perplexity, text_sequences
from specexport.compile.draft_cuts import (
    HeadCut,
    LayerPrune,
    check_num_layers,
    cut_pieces,
    rank_head_ids,
    read_counting_texts,
)
from specexport.compile.draft_trial import (
    Chosen,
    DraftForm,
    DraftTrial,
    FormChoice,
    HeadSizes,
    MakeForm,
    describe_trial,
)
from specexport.compile.lora import bind_adapters, describe_adapters
from specexport.compile.part import ModelSource, Part, Traits
from specexport.progress import StageClock
from specexport.recipe import KEEP, BuildRecipe, model_dtype, resolve_recipe, rounding, with_quantization
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.entry import DroppedLayer, ModelEntry, Rope, WeightFormat
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from specexport_runtime.executors.base import Float32Array, Int32Array, Int64Array

if TYPE_CHECKING:
    from specexport.checkpoint import Checkpoint
    from specexport.trace.layers import FeatureRequest

_NEEDED = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "huggingface_hub")
CALIBRATION_PIECES, CALIBRATION_LEN = 16, 64
"""1,024 tokens from all over the texts."""
_QUANTIZED_BYTES = {"int8": 1.01, "int4": 0.65}  # of a weight, with its scales
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


WHOLE = Reductions()


class ModelPart(Part):
    """A target or a draft."""

    def __init__(
        self,
        recipe: BuildRecipe,
        source: ModelSource,
        reductions: Reductions = WHOLE,
        *,
        features: "FeatureRequest | None" = None,  # what a target gives to a draft head; None for nothing
        checkpoint: "Checkpoint | None" = None,  # what it was loaded as, to be used up; None: not loaded yet
    ) -> None:
        super().__init__(recipe, source)
        self._reductions, self._features, self._given = reductions, features, checkpoint
        self.tries = reductions.trial is not None
        self._dropped: tuple[DroppedLayer, ...] = ()

    def load(self, folder: Path, clock: StageClock) -> DraftForm:
        """See ``Part.load``."""
        recipe, source, (cut, prune, trial) = self.recipe, self.source, self._reductions
        checkpoint = self._given or load_source(recipe, source, stream=prune is None)  # pruning runs it again and again
        self._given = None
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
        form = DraftForm(recipe.quantization_of(source.role), _head_ids(checkpoint, cut))
        self._others = () if trial is None else trial.others(_kept_share(checkpoint))
        self._each = [with_quantization(recipe, source.role, name) for name in (form.quantize, *self._others)]
        require_space(folder, sum(_needed_bytes(one, checkpoint, source.role) for one in self._each))
        self.recipe, self._checkpoint, self._adapters = recipe, checkpoint, adapters
        return form

    def reduce(self, clock: StageClock) -> None:
        """See ``Part.reduce``."""
        self._dropped = _drop_layers(self._checkpoint, self._reductions.prune, self.source.role, clock)

    def refer(self) -> None:
        """See ``Part.refer``."""
        obstacle, role = check_obstacle(self.recipe), self.source.role
        self._references = {
            on_texts: _eager_reference(self._checkpoint, self._adapters.chosen, on_texts=on_texts)
            for on_texts in {_is_approximate(one, role) for one in self._each if obstacle is None}
        }
        if self.recipe.check and model_dtype(self.recipe) == "float16":
            _refuse_overflow(self._checkpoint, next(iter(self._references.values()), None))

    def measure(self, clock: StageClock) -> None:
        """See ``Part.measure``."""
        self._ranges, self._cache_ranges = _calibrate(self._checkpoint, self._each, self.source.role, clock)

    def trace(self) -> Any:
        """See ``Part.trace``."""
        from specexport.trace import trace_checkpoint

        checkpoint = self._checkpoint
        self._sizes = _head_sizes(checkpoint)
        grouped = find_backend(self.recipe.backend).groups_experts
        traced = trace_checkpoint(checkpoint, self._features, group_experts=grouped)
        self._layers, self._states, self._windows = tuple(traced.layers), traced.states, traced.windows
        # A copy of the graph (not of the weights): the exporter's own still refers to tied weights it has dropped.
        ir_model = traced.ir_model.clone()
        del traced, checkpoint.model  # the graph holds the weights now
        gc.collect()
        return ir_model

    def job(self, recipe: BuildRecipe, form: DraftForm, folder: Path, clock: StageClock) -> BuildJob:
        """See ``Part.job``."""
        checkpoint, role = self._checkpoint, self.source.role
        keeps = form.quantize == KEEP
        return BuildJob(
            recipe, role, self._layers, checkpoint.num_parameters, checkpoint.max_positions, folder, clock,
            states=self._states,
            adapters=self._adapters.products,
            head_ids=form.head_ids,
            input_ranges=self._ranges if _weighs_inputs(recipe, role) else None,
            cache_ranges=self._cache_ranges,
            kept=checkpoint.kept if keeps else None,
            kept_formats=_weight_formats(checkpoint) if keeps else (),
        )  # fmt: skip

    def traits(self, form: DraftForm) -> Traits:
        """See ``Part.traits``."""
        checkpoint, rope = self._checkpoint, self._checkpoint.rope
        return Traits(
            checkpoint.architecture,
            checkpoint.vocab_size,
            checkpoint.num_parameters,
            self._sizes.step(form.head_ids),
            self._sizes.num_heads,
            self._windows,
            rope=None if rope is None else Rope(rope.text, rope.max_len),
            dropped_layers=self._dropped,
            adapters=describe_adapters(self._adapters.all, chosen=self.recipe.chooses_adapters),
        )

    def choose(self, first: Chosen, folder: Path, clock: StageClock, make: MakeForm) -> Chosen:
        """See ``Part.choose``."""
        trial = self._reductions.trial
        if trial is None:
            return first
        with clock.stage("trial", self.source.role, steps=0):
            rank = partial(_rank_ids, self._checkpoint)
            chosen = FormChoice(trial, first, self._others, folder, make, self._sizes, rank).settle()
            clock.note(describe_trial(chosen.entry)[0])
        return chosen

    def check(self, folder: Path, chosen: Chosen) -> EngineCheck | None:
        """See ``Part.check``."""
        form, entry = chosen
        reference = self._references.get(entry.approximation is not None)
        if reference is None:
            return None
        if form.head_ids is not None:
            reference = reference._replace(logits=[logits[:, form.head_ids] for logits in reference.logits])
        found = check_engine(folder, entry, *reference)
        if entry.approximation is None or form.head_ids is not None:
            return found
        perplexity = text_perplexity(self._checkpoint.tokenizer_json, reference.sequences, reference.logits)
        return found._replace(perplexity=perplexity)

    def built(self, entry: ModelEntry, files: Mapping[str, FileEntry], check: EngineCheck | None) -> BuiltModel:
        """See ``Part.built``."""
        checkpoint = self._checkpoint
        return BuiltModel(
            entry=entry,
            files=files,
            tokenizer_json=checkpoint.tokenizer_json,
            chat_template=checkpoint.chat_template,
            special_tokens=dict(checkpoint.special_tokens),
            bos_token_id=checkpoint.bos_token_id,
            eos_token_ids=tuple(checkpoint.eos_token_ids),
            check=check,
        )


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


def _kept_share(checkpoint: "Checkpoint") -> float | None:
    """Bytes of a weight as the checkpoint has it; None where it holds float weights."""
    formats = _weight_formats(checkpoint)
    return sum(each.num_bytes for each in formats) / sum(each.weights for each in formats) if formats else None


def _needed_bytes(recipe: BuildRecipe, checkpoint: "Checkpoint", role: str) -> int:
    """What the engines of a model take on disk, about."""
    copies = 1 + len(recipe.sm)  # the graph, and an engine for each architecture
    item, quantize = ITEM_BYTES[recipe.dtype], recipe.quantization_of(role)
    tables = {id(table): table.numel() for table in table_weights(checkpoint.model)}
    outside = 0 if quantize is None or recipe.quantize_lm_head else sum(tables.values())
    size = float(item * outside)
    if quantize == KEEP:
        kept = {id(weight): weight for weight in checkpoint.kept.values()}.values()
        stored = sum(weight.shape[0] * weight.shape[1] for weight in kept)
        size += sum(weight.stored_bytes for weight in kept) + item * (checkpoint.num_parameters - stored)
    else:
        each = _QUANTIZED_BYTES.get(str(quantize), item)
        of_table, held = item if quantize is None else _QUANTIZED_BYTES["int8"], sum(tables.values()) - outside
        size += of_table * held + each * (checkpoint.num_parameters - held - outside)
        if quantize == "int4" and len(tables) == 1:  # a large tied LM head has codes of its own
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


def load_source(recipe: BuildRecipe, source: ModelSource, *, stream: bool = True) -> "Checkpoint":
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


def _round(checkpoint: "Checkpoint", recipe: BuildRecipe, role: str) -> None:
    from specexport.checkpoint import round_weights

    rounded = rounding(recipe, role)
    if rounded is not None:
        round_weights(checkpoint, rounded)


def resolve_for(recipe: BuildRecipe, checkpoint: "Checkpoint") -> BuildRecipe:
    """The recipe for one model; ``auto`` becomes a length for which no rotary table depends on the length.

    Raises RecipeError if max_model_len is larger than the model supports.
    """
    plain = [checkpoint.plain_positions] if recipe.max_model_len == "auto" else []
    return resolve_recipe(recipe, [checkpoint.max_positions, *plain])


def _refuse_overflow(checkpoint: "Checkpoint", reference: _Reference | None) -> None:
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


def _eager_reference(checkpoint: "Checkpoint", adapters: Sequence[Any] = (), *, on_texts: bool = False) -> _Reference:
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
    return recipe.quantization_of(role) == "int4" and find_backend(recipe.backend).own_operators


def _calibrate(
    checkpoint: "Checkpoint", recipes: Sequence[BuildRecipe], role: str, clock: StageClock
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


def _head_ids(checkpoint: "Checkpoint", cut: HeadCut | None) -> Int32Array | None:
    """Token ids that the LM head keeps; None if it keeps all."""
    if cut is None or cut.size == checkpoint.vocab_size:
        return None
    return np.sort(_rank_ids(checkpoint, cut)[: cut.size])


def _rank_ids(checkpoint: "Checkpoint", cut: HeadCut) -> Int32Array:
    """All token ids, those first that stay in the LM head."""
    ends = [token for token in (checkpoint.bos_token_id, *checkpoint.eos_token_ids) if token is not None]
    return rank_head_ids(
        cut,
        checkpoint.tokenizer_json,
        checkpoint.vocab_size,
        keep=ends,
        special_tokens=list(checkpoint.special_tokens.values()),
    )


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
