"""What each engine is compared with: eager logits for a float engine, the float model's loss for an approximation.

With quantized weights or caches, logits are not those of the checkpoint, so no tensor tolerance fits; what such an
engine promises is that text is hardly less likely under it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specexport.progress import StageClock
from specexport.verify.checkpoint import (
    CheckpointNotFoundError,
    EagerModel,
    VerifiedAdapter,
    eager_references,
    eager_score,
    find_checkpoint,
    recorded_revision,
    recorded_rounding,
)
from specexport.verify.logits import make_sequences
from specexport.verify.perplexity import TopTokens, score_engine
from specexport_runtime.bundle.arrays import load_cut_head
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.bundle.token_map import own_texts
from specexport_runtime.errors import InvalidRequestError, MissingDependencyError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.executors.open import open_executor

if TYPE_CHECKING:
    from specexport.verify.options import VerifyOptions

EAGER = "eager transformers"
"""Name of the float model where it is the checkpoint."""


@dataclass(frozen=True)
class EagerLogits:
    """What an engine's logits are compared with."""

    sequences: list[list[int]]  # token ids
    logits: list[Float32Array]  # eager logits [len, V] of each; [len, N] if the engine's LM head was cut


@dataclass(frozen=True)
class FloatScore:
    """What the float model makes of the windows."""

    loss: float  # nats per token
    likeliest: TopTokens | None  # its distributions
    source: str  # what the float model was, in words


@dataclass(frozen=True)
class References:
    """What was found to compare with, by role."""

    logits: dict[str, EagerLogits] = field(default_factory=dict)  # for engines that are no approximation
    # for approximations, and for all where a text was given
    losses: dict[str, FloatScore] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # why a role lacks what it needs


def list_roles(manifest: Manifest) -> list[str]:
    """The bundle's models that are compared with their checkpoints, the target first; a draft head is none."""
    return sorted((name for name in manifest.models if name != "head"), key=lambda name: name != "target")


def needs_loss(manifest: Manifest, role: str, options: "VerifyOptions") -> bool:
    """Whether the perplexity of a role is looked at: that of approximations, and of all where a text was given."""
    return manifest.models[role].approximation is not None or options.texts is not None


def collect_references(
    bundle: Path,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],  # token ids
    windows: Sequence[Sequence[int]],  # token ids of the text that perplexity is measured on
    options: "VerifyOptions",
    clock: StageClock,
    adapter: VerifiedAdapter | None = None,  # of the target
) -> References:
    """Compute what the engines will be compared with; no model stays in memory."""
    found = References()
    if options.reference is not None:
        _losses_of_bundle(bundle, options.reference, manifest, windows, options, clock, found, adapter)
    sources = _find_checkpoints(bundle, manifest, options, found, adapter)
    for role, source in sources.items():
        entry = manifest.models[role]
        cut_head, own_windows = load_cut_head(bundle, entry), own_texts(bundle, manifest.models, role, windows)
        model = EagerModel(
            source,
            entry.dtype,
            recorded_revision(manifest, role),
            options.trust_remote_code,
            dropped=[layer for layer, _ in entry.dropped_layers],
            adapter=adapter if role == "target" else None,
            rope_len=None if entry.rope is None else entry.rope.max_len,
            rounded=recorded_rounding(manifest, role),
        )
        with clock.stage("eager reference", role):
            if needs_loss(manifest, role, options) and role not in found.losses:
                score = eager_score(model, own_windows, cut_head)
                found.losses[role] = FloatScore(score.loss, score.likeliest, EAGER)
            if entry.approximation is None:
                texts = own_texts(bundle, manifest.models, role, prompts)
                sequences = make_sequences(
                    texts, entry.vocab_size, lookahead=manifest.lookahead, max_model_len=manifest.max_model_len
                )
                logits = eager_references(model, sequences)
                if cut_head is not None:
                    logits = [rows[:, cut_head.ids] for rows in logits]
                found.logits[role] = EagerLogits(sequences, logits)
    return found


def _find_checkpoints(
    bundle: Path,
    manifest: Manifest,
    options: "VerifyOptions",
    found: References,
    adapter: VerifiedAdapter | None,
) -> Mapping[str, str]:
    """Checkpoint of each role that still needs one; why a role has none goes to ``found.missing``."""
    unknown = sorted(set(options.checkpoints) - set(manifest.models))
    if unknown:
        raise InvalidRequestError(f"{bundle} has no {unknown[0]} model.", f"leave out its checkpoint ({unknown[0]}).")
    sources: dict[str, str] = {}
    for role in list_roles(manifest):
        given = options.checkpoints.get(role)
        if manifest.models[role].approximation is not None and role in found.losses and given is None:
            continue
        try:
            source = find_checkpoint(manifest, role, given, bundle)
            if role == "target" and adapter is not None and adapter.source is None:
                raise CheckpointNotFoundError(
                    f"the LoRA adapter {adapter.entry.name} ({adapter.entry.source}) was not given.",
                    f"name it with --lora {adapter.entry.name}=FOLDER.",
                )
            _require_torch()
        except (CheckpointNotFoundError, MissingDependencyError) as error:
            if options.require_checkpoint or given is not None:
                raise
            found.missing[role] = str(error)
        else:
            sources[role] = source
    return sources


def _require_torch() -> None:
    from specexport.compile.model import require_export_stack

    require_export_stack()


def _losses_of_bundle(
    bundle: Path,
    reference: Path,
    manifest: Manifest,
    windows: Sequence[Sequence[int]],
    options: "VerifyOptions",
    clock: StageClock,
    found: References,
    adapter: VerifiedAdapter | None,
) -> None:
    """Loss of each role whose float model is in the reference bundle."""
    other = load_manifest(reference)
    for role in (role for role in list_roles(manifest) if needs_loss(manifest, role, options)):
        entry, model = manifest.models[role], other.models.get(role)
        if model is None and role != "target":
            continue  # a checkpoint may serve
        if model is None or model.approximation is not None or model.source.sha256 != entry.source.sha256:
            approximate = model is not None and model.approximation is not None
            what = "is an approximation itself" if approximate else "was built from another checkpoint"
            raise InvalidRequestError(
                f"--reference {reference}: its {role} {what}, so nothing can be compared with it.",
                f"give a bundle built from {entry.source.name} without --quantize and --kv-cache-dtype.",
            )
        if model.kept_layers != entry.kept_layers:
            raise InvalidRequestError(
                f"--reference {reference}: its {role} was built with other layers of its checkpoint.",
                "give a bundle built with the same --draft-layers and --draft-vocab-texts.",
            )
        if [(each.sha256, each.use) for each in model.adapters] != [(each.sha256, each.use) for each in entry.adapters]:
            raise InvalidRequestError(
                f"--reference {reference}: its {role} was built with other LoRA adapters.",
                "give a bundle built with the same --lora.",
            )
        cut_head = load_cut_head(bundle, entry)
        theirs = load_cut_head(reference, model)
        if theirs is not None and (cut_head is None or not np.array_equal(theirs.ids, cut_head.ids)):
            raise InvalidRequestError(
                f"--reference {reference}: its {role} has an LM head of {len(theirs.ids)} other tokens.",
                f"give a bundle built from {entry.source.name} without --draft-vocab-size.",
            )
        own_windows = own_texts(bundle, manifest.models, role, windows)
        with clock.stage("reference bundle", role):
            longest = max(map(len, own_windows))
            opened = load_bundle(reference, max_num_seqs=1, max_model_len=min(longest, other.max_model_len))
            executor = open_executor(opened, role, num_threads=options.num_threads, spin=options.spin)
            try:
                if role == "target" and adapter is not None and adapter.chosen is not None:
                    number = entry.chosen_adapters.index(adapter.chosen) + 1  # the same, by hash
                    executor.default_adapter = number
                score = score_engine(executor, own_windows, lookahead=other.lookahead, cut_head=cut_head)
            finally:
                executor.close()
            found.losses[role] = FloatScore(score.loss, score.likeliest, f"bundle {other.name}")
