"""A draft head as a part of a bundle: what it reads of its target is settled first, for the target gives it."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.backends.base import BuildJob
from specexport.backends.registry import BACKENDS, find_backend
from specexport.compile.built import TOKENIZER_NAME, BuiltModel, EngineCheck
from specexport.compile.check import check_obstacle
from specexport.compile.check_head import CHECK_LENS, HeadReference, causal_reference, check_head
from specexport.compile.draft_cuts import cut_pieces, read_counting_texts
from specexport.compile.draft_trial import Chosen, DraftForm
from specexport.compile.model import load_source, resolve_for, table_weights
from specexport.compile.part import ModelSource, Part, Traits
from specexport.compile.vocabulary import check_vocabularies, read_vocabulary
from specexport.progress import StageClock
from specexport.recipe import MTP, BuildRecipe, model_dtype
from specexport_runtime.bundle.arrays import MASK_NAME
from specexport_runtime.bundle.entry import DraftHeadEntry, ModelEntry
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.bundle.profiles import head_steps
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specexport.checkpoint import Checkpoint
    from specexport.heads.config import HeadConfig
    from specexport.heads.files import HeadFiles
    from specexport.heads.loaded import LoadedHead, TargetTables
    from specexport.heads.probe import Probe
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
    recipe: BuildRecipe  # resolved


def plan_head(
    recipe: BuildRecipe, source: ModelSource, target: ModelSource, clock: StageClock
) -> "tuple[HeadPlan, Checkpoint]":
    """Read a head's configuration and look at how it guesses; gives the target too, which was loaded for that.

    Raises CheckpointError or UnsupportedModelError if it cannot be read, is for another target, or guesses at chance.
    """
    with clock.stage("probe", source.role, source.name):
        checkpoint = load_source(recipe, target)
        _check_tokenizer(source, checkpoint)
        files, loaded = _load(recipe, source, checkpoint)
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
    del loaded
    gc.collect()
    # Weights that are in no files as they are must not be kept in memory beside an engine: they are loaded again.
    tables = _stored_tables(checkpoint) or (lambda: _tables(load_source(recipe, target)))
    of_target = checkpoint.tokenizer_json, checkpoint.max_positions, resolve_for(recipe, checkpoint)
    return HeadPlan(config, request, probe, files, tables, *of_target), checkpoint


def _check_kind(recipe: BuildRecipe, source: ModelSource, config: "HeadConfig") -> None:
    """Refuse a head that a backend has no form of, before its target is built."""
    obstacle = find_backend(recipe.backend).head_obstacle(config.kind, recipe)
    if obstacle is not None:
        able = [name for name, backend in BACKENDS.items() if config.kind in backend.head_kinds]
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

    if recipe.draft is not None or recipe.head is not None or not find_backend(recipe.backend).head_kinds:
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

    path = resolve_source(source.source, source.revision).folder / TOKENIZER_NAME
    if path.is_file():
        own = read_vocabulary(path.read_bytes(), where=source.name)
        target = read_vocabulary(checkpoint.tokenizer_json, where=checkpoint.source)
        check_vocabularies(target, own, num_shared_rows=None)


def _check_caches(recipe: BuildRecipe, config: "HeadConfig", name: str) -> None:
    """Refuse a head that reads caches of the target where these hold int8: only the target's graph has the scales."""
    if config.assistant is not None and recipe.kv_cache_dtype is not None:
        raise UnsupportedModelError(
            f"the head {name} reads the target's KV caches, and these hold {recipe.kv_cache_dtype}, which it cannot "
            "read.",
            "leave --kv-cache-dtype out.",
        )


def _request(config: "HeadConfig", projection: Any) -> "FeatureRequest":
    from specexport.trace.layers import FeatureRequest

    return FeatureRequest(config.taps, projection, config.feature_size)


def _load(recipe: BuildRecipe, source: ModelSource, checkpoint: "Checkpoint") -> "tuple[HeadFiles, LoadedHead]":
    import torch

    from specexport.checkpoint.source import resolve_source
    from specexport.heads.files import open_head
    from specexport.heads.load import load_head
    from specexport.heads.mtp_files import open_mtp
    from specexport.heads.read import read_config
    from specexport.heads.read_assistant import is_assistant, lent_caches

    found, text = resolve_source(source.source, source.revision), checkpoint.model.config.get_text_config()
    files = open_mtp(found, text.to_dict()) if recipe.head == MTP else open_head(found)
    config = read_config(
        files,
        num_layers=_num_layers(checkpoint),
        target_hidden_size=int(text.hidden_size),
        vocab_size=checkpoint.vocab_size,
        target_layer=text.to_dict(),
        lent=lent_caches(text) if is_assistant(files) else None,  # a model without attention has none
    )
    return files, load_head(files, config, _tables(checkpoint), getattr(torch, checkpoint.dtype))


def _num_layers(checkpoint: "Checkpoint") -> int:
    return int(checkpoint.model.config.get_text_config().num_hidden_layers)


def _tables(checkpoint: "Checkpoint") -> "TargetTables":
    """Embedding and LM head of a target, read if they are in files."""
    from specexport.heads.loaded import TargetTables

    stored = _stored_tables(checkpoint)
    return TargetTables(*(each.detach() for each in table_weights(checkpoint.model))) if stored is None else stored()


def _stored_tables(checkpoint: "Checkpoint") -> "Callable[[], TargetTables] | None":
    """What reads the embedding and LM head of a target from its files; None where they are in memory."""
    from specexport.checkpoint.stored import stored_by_id
    from specexport.heads.loaded import TargetTables

    stored = stored_by_id(checkpoint.model, checkpoint.stored)
    weights = [stored.get(id(weight)) for weight in table_weights(checkpoint.model)]
    embedding, lm_head = weights
    if embedding is None or lm_head is None:
        return None

    def read() -> TargetTables:
        table = embedding.whole()
        return TargetTables(table, table if lm_head is embedding else lm_head.whole())

    return read


def _pieces(checkpoint: "Checkpoint") -> Sequence[np.ndarray]:
    return cut_pieces(
        read_counting_texts(None),
        checkpoint.tokenizer_json,
        checkpoint.vocab_size,
        max_positions=checkpoint.max_positions,
        num_pieces=PROBE_PIECES,
        piece_len=PROBE_LEN,
    )


class HeadPart(Part):
    """A draft head, which may share the target's embedding and LM head."""

    def __init__(self, source: ModelSource, plan: HeadPlan) -> None:
        super().__init__(plan.recipe, source)
        self._plan = plan

    def load(self, folder: Path, clock: StageClock) -> DraftForm:
        """See ``Part.load``."""
        import torch

        from specexport.checkpoint.source import hash_source, resolve_source
        from specexport.heads.load import load_head

        del folder, clock
        plan, source = self._plan, self.source
        loaded = load_head(plan.files, plan.config, plan.tables(), getattr(torch, model_dtype(self.recipe)))
        found = resolve_source(source.source, source.revision, remote_code=self.recipe.trust_remote_code)
        if hash_source(found) != source.sha256:
            raise CheckpointError(f"checkpoint {source.name} changed while it was read.", "build again.")
        head = loaded.head
        self._num_parameters = sum(parameter.numel() for parameter in head.parameters())
        self._step_parameters, self._mask = head.step_parameters, loaded.mask_feature
        self._loaded = loaded
        return DraftForm(self.recipe.quantization_of(source.role), loaded.ids)

    def refer(self) -> None:
        """See ``Part.refer``."""
        self._checked = _reference(self._loaded) if check_obstacle(self.recipe) is None else None

    def trace(self) -> Any:
        """See ``Part.trace``."""
        from specexport.heads.trace import trace_head

        backend = find_backend(self.recipe.backend)
        traced = trace_head(self._loaded.head, fixed_sizes=backend.fixed_sizes, group_experts=backend.groups_experts)
        self._layers = tuple(traced.layers)
        del self._loaded  # the graph holds the weights now
        return traced.ir_model.clone()

    def job(self, recipe: BuildRecipe, form: DraftForm, folder: Path, clock: StageClock) -> BuildJob:
        """See ``Part.job``."""
        del form
        config = self._plan.config
        steps = head_steps(
            recipe.lookahead,
            num_draft_heads=0 if config.medusa is None else config.medusa.num_heads,
            block_size=config.block_size,
            has_mask=config.mask_token_id is not None,
        )
        return BuildJob(
            recipe, self.source.role, self._layers, self._step_parameters, self._plan.max_positions, folder, clock,
            first_only=config.hydra is not None, feature_size=config.feature_size, head_steps=steps,
        )  # fmt: skip

    def traits(self, form: DraftForm) -> Traits:
        """See ``Part.traits``."""
        del form
        config, probe = self._plan.config, self._plan.probe
        return Traits(
            f"{config.kind} head of {config.source_format} ({config.layer_config['model_type']})",
            config.vocab_size,
            self._num_parameters,
            self._step_parameters,
            config.layer_config.get("num_attention_heads"),
            target_layers=() if config.assistant is None else config.assistant.target_layers,
            draft_head=DraftHeadEntry(
                config.kind,
                config.taps,
                guessed=None if probe is None else probe.rate,
                reading=None if probe is None else probe.reading.change or None,
                num_draft_heads=config.num_draft_heads,
                mask_token_id=config.mask_token_id,
                mask_path=None if self._mask is None else MASK_NAME,
                block_size=config.block_size,
            ),
            mask=self._mask,
        )

    def check(self, folder: Path, chosen: Chosen) -> EngineCheck | None:
        """See ``Part.check``."""
        return None if self._checked is None else check_head(folder, chosen.entry, self._checked)

    def built(self, entry: ModelEntry, files: Mapping[str, FileEntry], check: EngineCheck | None) -> BuiltModel:
        """See ``Part.built``."""
        return BuiltModel(entry, files, self._plan.tokenizer_json, check)


def _reference(loaded: "LoadedHead") -> HeadReference:
    import torch

    from specexport.heads.trace import causal_step

    if loaded.config.kind == "assistant":
        from specexport.compile.check_head import assistant_reference

        return assistant_reference(loaded.head, loaded.config)
    if loaded.config.kind == "dflash":
        from specexport.compile.check_head import block_reference

        return block_reference(loaded.head, loaded.config)
    if loaded.config.kind == "hydra":
        from specexport.compile.check_head import hydra_reference

        return hydra_reference(loaded.head, loaded.config)
    generator, medusa = np.random.default_rng(21), loaded.config.medusa
    most = loaded.config.vocab_size if medusa is None else medusa.num_heads  # their ids are numbers of heads
    tokens = [generator.integers(0, most, n) for n in CHECK_LENS]
    features = [generator.normal(0, 1, (n, loaded.config.feature_size)).astype(np.float32) for n in CHECK_LENS]
    runs = [
        causal_step(loaded.head, torch.from_numpy(ids), torch.from_numpy(each).to(loaded.head.dtype))
        for ids, each in zip(tokens, features, strict=True)
    ]
    logits, handed = ([run[at].float().numpy() for run in runs] for at in (0, 1))
    return causal_reference(tokens, features, logits, handed)
