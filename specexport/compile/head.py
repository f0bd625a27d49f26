"""A draft head through the stages: what it reads of its target is settled first, for the target's engine gives it."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.backends.base import BuildJob
from specexport.backends.registry import BACKENDS, find_backend
from specexport.compile.built import TOKENIZER_NAME, BuiltModel
from specexport.compile.check_head import check_head
from specexport.compile.draft_cuts import cut_pieces, read_counting_texts
from specexport.compile.model import ModelSource, compile_graph, load_source, resolve_for, save_lm_head_ids
from specexport.compile.vocabulary import check_vocabularies, read_vocabulary
from specexport.progress import StageClock
from specexport.recipe import MTP, BuildRecipe, model_dtype
from specexport_runtime.bundle.arrays import MASK_NAME
from specexport_runtime.bundle.entry import AttentionEntry, DraftHeadEntry, ModelEntry, Parameters, SourceEntry
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.profiles import head_steps
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specexport.heads.config import HeadConfig
    from specexport.heads.loaded import LoadedHead, TargetTables
    from specexport.heads.probe import Probe
    from specexport.trace.layers import FeatureRequest

PROBE_PIECES, PROBE_LEN = 6, 64
"""384 tokens from all over the built-in texts."""


class HeadPlan(NamedTuple):
    """What is known of a head before its target is built."""

    config: "HeadConfig"  # what it computes, in the reading that was accepted
    request: "FeatureRequest"  # what the target is to give
    probe: "Probe | None"  # how often it guessed right; None if that was not looked at


def plan_head(recipe: BuildRecipe, source: ModelSource, target: ModelSource, clock: StageClock) -> HeadPlan:
    """Read a head's configuration and look at how it guesses.

    Raises CheckpointError or UnsupportedModelError if it cannot be read, is for another target, or guesses at chance.
    """
    with clock.stage("probe", source.role, source.name):
        checkpoint = load_source(recipe, target)
        _check_tokenizer(source, checkpoint)
        loaded = _load(recipe, source, checkpoint)
        _check_kind(recipe, source, loaded.config)
        _check_caches(recipe, loaded.config, source.name)
        probe, config = None, loaded.config
        if recipe.check:
            from specexport.checkpoint.streaming import streamed
            from specexport.heads.probe import check_probe, probe_head

            with streamed(checkpoint.model, checkpoint.stored):
                probe = probe_head(checkpoint.model, loaded, _pieces(checkpoint), _num_layers(checkpoint))
            check_probe(probe, source.name)
            clock.note(describe_probe(probe.rate, probe.reading.change))
            config = probe.reading.config
        request = _request(config, loaded.projection)
    del checkpoint, loaded
    gc.collect()
    return HeadPlan(config, request, probe)


def _check_kind(recipe: BuildRecipe, source: ModelSource, config: "HeadConfig") -> None:
    """Refuse a head that a backend has no form of, before its target is built."""
    from specexport.heads.kinds import kind_of

    needs = kind_of(config).needs
    obstacle = find_backend(recipe.backend).head_obstacle(config.kind, needs, recipe)
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


def untaken_module(recipe: BuildRecipe) -> str | None:
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


def _check_tokenizer(source: ModelSource, checkpoint: Any) -> None:
    """Compare the head's tokenizer with the target's, where it has one."""
    from specexport.checkpoint.source import resolve_source

    path = resolve_source(source.source, source.revision).folder / TOKENIZER_NAME
    if path.is_file():
        own = read_vocabulary(path.read_bytes(), where=source.name)
        target = read_vocabulary(checkpoint.tokenizer_json, where=checkpoint.source)
        check_vocabularies(target, own, num_shared_rows=None)


def _check_caches(recipe: BuildRecipe, config: "HeadConfig", name: str) -> None:
    """Refuse a head that reads caches of the target where these hold int8: only the target's graph has the scales."""
    if config.target_layers and recipe.kv_cache_dtype is not None:
        raise UnsupportedModelError(
            f"the head {name} reads the target's KV caches, and these hold {recipe.kv_cache_dtype}, which it cannot "
            "read.",
            "leave --kv-cache-dtype out.",
        )


def _request(config: "HeadConfig", projection: Any) -> "FeatureRequest":
    from specexport.trace.layers import FeatureRequest

    return FeatureRequest(config.taps, projection, config.feature_size)


def _load(
    recipe: BuildRecipe, source: ModelSource, checkpoint: Any, config: "HeadConfig | None" = None
) -> "LoadedHead":
    import torch

    from specexport.checkpoint.source import resolve_source
    from specexport.heads.config import TargetFacts
    from specexport.heads.kinds import kind_of, open_head, read_config
    from specexport.heads.mtp_files import open_mtp

    found, text = resolve_source(source.source, source.revision), checkpoint.model.config.get_text_config()
    files = open_mtp(found, text.to_dict()) if recipe.head == MTP else open_head(found)
    if config is None:
        facts = TargetFacts(_num_layers(checkpoint), int(text.hidden_size), checkpoint.vocab_size, text)
        config = read_config(files, facts)
    return kind_of(config).load(files, config, _tables(checkpoint), getattr(torch, checkpoint.dtype))


def _num_layers(checkpoint: Any) -> int:
    return int(checkpoint.model.config.get_text_config().num_hidden_layers)


def _tables(checkpoint: Any) -> "TargetTables":
    """Embedding and LM head of a target, read if they are in files."""
    from specexport.checkpoint.stored import stored_by_id
    from specexport.heads.loaded import TargetTables

    model, stored = checkpoint.model, stored_by_id(checkpoint.model, checkpoint.stored)
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    found: dict[int, Any] = {}
    for weight in weights:
        if id(weight) not in found:
            found[id(weight)] = stored[id(weight)].whole() if id(weight) in stored else weight.detach()
    return TargetTables(*(found[id(weight)] for weight in weights))


def _pieces(checkpoint: Any) -> Sequence[np.ndarray]:
    return cut_pieces(
        read_counting_texts(None),
        checkpoint.tokenizer_json,
        checkpoint.vocab_size,
        max_positions=checkpoint.max_positions,
        num_pieces=PROBE_PIECES,
        piece_len=PROBE_LEN,
    )


def build_head(
    recipe: BuildRecipe,  # ``"auto"`` allowed
    source: ModelSource,
    target: ModelSource,
    plan: HeadPlan,
    folder: Path,  # where the engine files go; created
    *,
    clock: StageClock,
    dump_dir: Path | None = None,  # where to write the graph after each pass, if anywhere
) -> BuiltModel:
    """Build the engine of a head, which may share the target's embedding and LM head.

    Raises CheckpointError if the head cannot be read, and CheckFailedError if the engine computes something else.
    """
    from specexport.heads.kinds import kind_of, trace_head

    role = source.role
    with clock.stage("load", role, source.name):
        checkpoint = load_source(recipe, target)
        recipe = resolve_for(recipe, checkpoint)
        loaded = _load(recipe, source, checkpoint, plan.config)
        tokenizer_json, max_positions = checkpoint.tokenizer_json, checkpoint.max_positions
        del checkpoint
    with clock.stage("reference", role):
        checks = recipe.check and find_backend(recipe.backend).check_obstacle(recipe) is None
        reference = kind_of(loaded.config).reference(loaded) if checks else None
    head, config = loaded.head, loaded.config
    num_parameters, step_parameters = sum(parameter.numel() for parameter in head.parameters()), head.step_parameters
    with clock.stage("trace", role):
        backend = find_backend(recipe.backend)
        traced = trace_head(head, fixed_sizes=backend.fixed_sizes, group_experts=backend.groups_experts)
        ir_model, layers = traced.ir_model.clone(), tuple(traced.layers)
        del traced, head
        ids, mask = loaded.ids, loaded.mask_feature
        del loaded
    steps = head_steps(
        recipe.lookahead,
        num_draft_heads=0 if config.reads_draft else config.num_draft_heads,
        block_size=config.block_size,
        has_mask=config.mask_token_id is not None,
    )
    job = BuildJob(
        recipe, role, layers, step_parameters, max_positions, folder, clock,
        first_only=config.reads_draft, feature_size=config.feature_size, head_steps=steps,
    )  # fmt: skip
    compiled = compile_graph(ir_model, recipe, job, dump_dir)
    if mask is not None:
        np.save(folder / MASK_NAME, mask, allow_pickle=False)
    gc.collect()
    architecture = f"{config.kind} head of {config.source_format} ({config.layer_config['model_type']})"
    dtype = model_dtype(recipe)
    entry = ModelEntry(
        backend=recipe.backend,
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_positions=max_positions,
        source=SourceEntry(source.name, source.sha256, architecture),
        parameters=Parameters(num_parameters, step_parameters, compiled.experts),
        attention=AttentionEntry(
            layers,
            dtype,
            config.layer_config.get("num_attention_heads"),
            target_layers=config.target_layers,
        ),
        engine=compiled.engine,
        quantize=recipe.quantization_of(role),
        passes=compiled.passes,
        cut_lm_head=save_lm_head_ids(folder, ids),
        draft_head=DraftHeadEntry(
            config.kind,
            config.taps,
            guessed=None if plan.probe is None else plan.probe.rate,
            reading=None if plan.probe is None else plan.probe.reading.change or None,
            num_draft_heads=config.num_draft_heads,
            reads_draft=config.reads_draft,
            mask_token_id=config.mask_token_id,
            mask_path=None if mask is None else MASK_NAME,
            block_size=config.block_size,
        ),
    )
    with clock.stage("check", role, "" if reference is not None else "not checked"):
        found = check_head(folder, entry, reference) if reference is not None else None
    return BuiltModel(
        entry=entry,
        files=hash_files(folder, [path.name for path in folder.iterdir()]),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        check=found,
    )
