"""A draft head as a part of a bundle: what it reads of its target is settled first, for the target gives it."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specexport.backends.base import BuildJob, PartRecipe
from specexport.backends.registry import BACKENDS, find_backend
from specexport.checkpoint.vocabulary import read_vocabulary
from specexport.compile.built import TOKENIZER_NAME, EngineCheck
from specexport.compile.check import find_unchecked_reason
from specexport.compile.check_head import check_head
from specexport.compile.draft_cuts import read_counting_texts
from specexport.compile.draft_trial import ChosenForm, DraftForm
from specexport.compile.model import cut_checkpoint_pieces, load_source, resolve_max_len, table_weights
from specexport.compile.part import ModelSource, Part, TokenizerData, TracedPart, make_entry_factory
from specexport.compile.vocabulary import check_vocabularies
from specexport.progress import StageClock
from specexport.recipe import FLOAT, MTP, NO_CHECK, BuildRecipe
from specexport_runtime.bundle.arrays import MASK_NAME
from specexport_runtime.bundle.entry import AttentionEntry, CorrectionEntry, DraftHeadEntry, Parameters
from specexport_runtime.bundle.profiles import head_steps
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specexport.checkpoint.loaded import Checkpoint
    from specexport.heads.config import HeadConfig
    from specexport.heads.files import HeadFiles
    from specexport.heads.loaded import LoadedHead, TargetTables
    from specexport.heads.probe import Probe
    from specexport.heads.reference import HeadReference
    from specexport.trace.layers import FeatureRequest

PROBE_PIECES, PROBE_LEN = 6, 64
"""384 tokens from all over the built-in texts."""


class HeadPlan(NamedTuple):
    """What is known of a head before its target is built, and what it needs of the target's checkpoint afterwards."""

    config: "HeadConfig"  # what it computes, in the reading that was accepted
    request: "FeatureRequest"  # what the target is to give
    probe: "Probe | None"  # how often it guessed right; None if that was not looked at
    files: "HeadFiles"
    tables: "Callable[[], TargetTables]"  # reads the target's embedding and LM head
    tokenizer_json: bytes  # of the target
    max_positions: int | None  # of the target
    max_model_len: int  # of the target


def plan_head(
    source: ModelSource, recipe: PartRecipe, target: ModelSource, clock: StageClock
) -> "tuple[HeadPlan, Checkpoint]":
    """Read a head's configuration and look at how it guesses; gives the target too, which was loaded for that.

    ``recipe`` is the target's.
    """
    from specexport.trace.layers import FeatureRequest

    with clock.stage("probe", source.role, source.name):
        checkpoint = load_source(recipe, target)
        _check_tokenizer(source, checkpoint)
        files, loaded = _load(source, checkpoint)
        _check_kind(recipe, source, loaded.config)
        _refuse_int8_caches(recipe, loaded.config, source.name)
        probe, config = None, loaded.config
        if recipe.check != NO_CHECK:
            from specexport.checkpoint.streaming import streamed
            from specexport.heads.probe import check_probe, probe_head

            pieces = cut_checkpoint_pieces(checkpoint, read_counting_texts(None), PROBE_PIECES, PROBE_LEN)
            with streamed(checkpoint.model, checkpoint.stored):
                probe = probe_head(checkpoint.model, loaded, pieces, _num_layers(checkpoint))
            check_probe(probe, source.name)
            clock.note(describe_probe(probe.rate, probe.reading.change))
            config = probe.reading.config
        request = FeatureRequest(config.taps, loaded.projection, config.feature_size)
    del loaded
    gc.collect()
    tables = _make_table_reader(checkpoint)
    if not checkpoint.stored:  # weights that are in no files as they are: none is kept in memory beside an engine
        tables = partial(_reload_tables, recipe, target)
    of_target = checkpoint.tokenizer_json, checkpoint.max_positions, resolve_max_len(recipe, checkpoint)
    return HeadPlan(config, request, probe, files, tables, *of_target), checkpoint


def _check_kind(recipe: PartRecipe, source: ModelSource, config: "HeadConfig") -> None:
    """Refuse a head that a backend has no form of, before its target is built."""
    from specexport.heads.kinds import find_kind

    needs = find_kind(config).needs
    obstacle = find_backend(recipe.backend).find_head_refusal(config.kind, needs, recipe)
    if obstacle is not None:
        able = [name for name, backend in BACKENDS.items() if backend.meets(needs)]
        raise UnsupportedModelError(
            f"{source.name} is a head of kind {config.kind}: {obstacle}.",
            f"build with `--backend {' or '.join(able)}`.",
        )


def describe_probe(rate: float, change: str | None) -> str:
    """What a probe found, for readers."""
    read = f", read otherwise than its files say: {change}" if change else ""
    return f"first guess right at {rate:.0%} of a text{read}"


def find_unused_mtp_hint(recipe: BuildRecipe) -> str | None:
    """A hint at an MTP module in the target's checkpoint that the recipe leaves out; None where there is none."""
    from specexport.checkpoint.source import resolve_source
    from specexport.heads.mtp_files import holds_module

    if recipe.draft is not None or recipe.head is not None or find_backend(recipe.backend).head_needs is None:
        return None
    try:
        source = resolve_source(recipe.target, recipe.revision)
    except CheckpointError:  # a hub that cannot be reached any more; the bundle is built
        return None
    if not holds_module(source):
        return None
    return f"{recipe.target} holds an MTP module: with `--head {MTP}` it drafts."


def _check_tokenizer(source: ModelSource, checkpoint: "Checkpoint") -> None:
    """Compare the head's tokenizer with the target's, where it has one."""
    from specexport.checkpoint.source import resolve_source

    found = resolve_source(source.source, source.revision)
    path = found.folder / TOKENIZER_NAME
    if found.gguf_file is None and path.is_file():
        own = read_vocabulary(path.read_bytes(), where=source.name)
        target = read_vocabulary(checkpoint.tokenizer_json, where=checkpoint.source)
        check_vocabularies(target, own, num_shared_rows=None)


def _refuse_int8_caches(recipe: PartRecipe, config: "HeadConfig", name: str) -> None:
    """Refuse a head that reads caches of the target where these hold int8: only the target's graph has the scales."""
    if config.target_layers and recipe.has_small_caches:
        raise UnsupportedModelError(
            f"the head {name} reads the target's KV caches, and these hold {recipe.kv_cache_dtype}, which it cannot "
            "read.",
            "leave --kv-cache-dtype out.",
        )


def _load(source: ModelSource, checkpoint: "Checkpoint") -> "tuple[HeadFiles, LoadedHead]":
    import torch

    from specexport.checkpoint.source import resolve_source
    from specexport.heads.assistant_gguf import is_assistant
    from specexport.heads.config import TargetFacts
    from specexport.heads.kinds import find_kind, open_head, read_config
    from specexport.heads.mtp_files import open_mtp

    found, text = resolve_source(source.source, source.revision), checkpoint.model.config.get_text_config()
    is_module = source.is_module or (found.gguf_file is not None and not is_assistant(found))
    files = open_mtp(found, text.to_dict()) if is_module else open_head(found)
    config = read_config(
        files, TargetFacts(_num_layers(checkpoint), int(text.hidden_size), checkpoint.vocab_size, text)
    )
    return files, find_kind(config).load(
        files, config, _make_table_reader(checkpoint)(), getattr(torch, checkpoint.dtype)
    )


def _num_layers(checkpoint: "Checkpoint") -> int:
    return int(checkpoint.model.config.get_text_config().num_hidden_layers)


def _make_table_reader(checkpoint: "Checkpoint") -> "Callable[[], TargetTables]":
    """What reads the embedding and LM head of a target; the checkpoint's model may be gone then."""
    from specexport.checkpoint.stored import StoredWeight, stored_by_id
    from specexport.heads.loaded import TargetTables

    stored = stored_by_id(checkpoint.model, checkpoint.stored)
    weights = [stored.get(id(weight), weight) for weight in table_weights(checkpoint.model)]

    def read() -> TargetTables:
        found = {id(each): each.whole() if isinstance(each, StoredWeight) else each.detach() for each in weights}
        return TargetTables(*(found[id(each)] for each in weights))

    return read


def _reload_tables(recipe: PartRecipe, target: ModelSource) -> "TargetTables":
    return _make_table_reader(load_source(recipe, target))()


def prepare_head(recipe: PartRecipe, source: ModelSource, plan: HeadPlan, folder: Path, clock: StageClock) -> Part:
    """Load a draft head, run it in torch, and trace it; ``folder`` is for its engine."""
    import torch

    from specexport.checkpoint.source import hash_source, resolve_source
    from specexport.heads.kinds import find_kind, trace_head

    config, probe, role = plan.config, plan.probe, source.role
    with clock.stage("load", role, source.name):
        loaded = find_kind(config).load(plan.files, config, plan.tables(), getattr(torch, recipe.model_dtype))
        found = resolve_source(source.source, source.revision, remote_code=recipe.trust_remote_code)
        if hash_source(found) != source.sha256:
            raise CheckpointError(f"checkpoint {source.name} changed while it was read.", "build again.")
    with clock.stage("reference", role):
        reference = find_kind(config).reference(loaded) if find_unchecked_reason(recipe) is None else None
    num_parameters = sum(parameter.numel() for parameter in loaded.head.parameters())
    step_parameters, mask, correction = loaded.head.step_parameters, loaded.mask_feature, loaded.correction
    arrays = {} if mask is None else {MASK_NAME: mask}
    if correction is not None:
        arrays |= {f"{name}.npy": table for name, table in correction.tables.items()}
    with clock.stage("trace", role):
        backend = find_backend(recipe.backend)
        traced = trace_head(loaded.head, fixed_sizes=backend.fixed_sizes, group_experts=backend.groups_experts)
    steps = head_steps(
        recipe.lookahead,
        num_draft_heads=0 if config.reads_draft else config.num_draft_heads,
        block_size=config.block_size,
        has_mask=config.mask_token_id is not None,
    )
    quantize = None if recipe.quantize == FLOAT else recipe.quantize
    job = BuildJob(
        recipe, quantize, plan.max_model_len, tuple(traced.layers), step_parameters, plan.max_positions, folder, clock,
        first_only=config.reads_draft, feature_size=config.feature_size, head_steps=steps,
    )  # fmt: skip
    described = DraftHeadEntry(
        config.kind,
        config.taps,
        guessed=None if probe is None else probe.rate,
        reading=None if probe is None else probe.reading.change or None,
        num_draft_heads=config.num_draft_heads,
        reads_draft=config.reads_draft,
        num_modules=config.num_modules,
        mask_token_id=config.mask_token_id,
        mask_path=None if mask is None else MASK_NAME,
        block_size=config.block_size,
        from_anchor=config.from_anchor,
        correction=None
        if correction is None
        else CorrectionEntry(correction.rule, tuple(f"{name}.npy" for name in correction.tables), correction.most),
    )
    heads = config.layer_config.get("num_attention_heads")
    entry = make_entry_factory(
        source,
        job,
        f"{config.kind} head of {config.source_format} ({config.layer_config['model_type']})",
        vocab_size=config.vocab_size,
        attention=AttentionEntry(job.layers, recipe.model_dtype, heads, target_layers=config.target_layers),
        draft_head=described,
    )
    return Part(
        source,
        DraftForm(quantize, loaded.ids),
        TracedPart(traced.ir_model.clone(), job),
        check=partial(_check_head, reference),
        texts=TokenizerData(plan.tokenizer_json),
        entry=entry,
        parameters=lambda _: Parameters(num_parameters, step_parameters),
        comes_cut=True,
        arrays=arrays,
    )


def _check_head(reference: "HeadReference | None", folder: Path, chosen: ChosenForm) -> EngineCheck | None:
    return None if reference is None else check_head(folder, chosen.entry, reference)
