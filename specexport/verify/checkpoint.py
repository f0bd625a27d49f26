"""Finding the checkpoint that an engine was built from, by its hash, and its eager logits.

A manifest has a name and a hash and no path: the place that the user's cache has for the hash is tried, and the name
where it may lie; the hash decides.
"""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.verify.perplexity import TextScore, score_logits
from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.bundle.entry import AdapterEntry, SourceEntry
from specexport_runtime.bundle.manifest import Manifest
from specexport_runtime.errors import CheckpointError, InvalidRequestError
from specexport_runtime.executors.base import Float32Array

if TYPE_CHECKING:
    from specexport.checkpoint.loaded import Checkpoint
    from specexport.checkpoint.lora import LoraSource

_REVISION_KEYS = {"target": "revision", "draft": "draft_revision"}
_OPTIONS = {"target": "--checkpoint", "draft": "--draft-checkpoint"}


class VerifiedAdapter(NamedTuple):
    """An adapter of a bundle's target."""

    entry: AdapterEntry
    source: "LoraSource | None"  # its files; None if they were not given

    @property
    def chosen(self) -> str | None:
        """Its name, where requests choose it; None where it is in the weights."""
        return self.entry.name if self.entry.use == "chosen" else None


def find_adapter(manifest: Manifest, asked: str | None) -> VerifiedAdapter | None:
    """The adapter asked for as ``"NAME"`` or ``"NAME=FOLDER"``; None asks for the merged one, if there is one."""
    adapters = {adapter.name: adapter for adapter in manifest.models["target"].adapters}
    if asked is None:
        merged = next((adapter for adapter in adapters.values() if adapter.use == "merged"), None)
        return None if merged is None else VerifiedAdapter(merged, None)
    name, _, folder = asked.partition("=")
    if name not in adapters:
        fix = f"give one of {', '.join(adapters)}." if adapters else "leave --lora out."
        raise InvalidRequestError(f"the bundle {manifest.name} has no LoRA adapter {name!r}.", fix)
    if not folder:
        return VerifiedAdapter(adapters[name], None)
    from specexport.checkpoint.lora import find_adapter as find

    source = find(name, folder)
    if source.sha256 != adapters[name].sha256:
        raise CheckpointError(
            f"--lora {asked} is not what this bundle was built with: its sha256 is {source.sha256[:16]}…, the manifest "
            f"records {adapters[name].sha256[:16]}… ({adapters[name].source}).",
            f"give the adapter {adapters[name].source} as it was at build time.",
        )
    return VerifiedAdapter(adapters[name], source)


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint with the recorded hash was found where one was looked for."""


def find_checkpoint(manifest: Manifest, role: str, given: str | None, bundle: Path) -> str:
    """The checkpoint with the hash that the manifest records for ``role``; CheckpointNotFoundError if there is none."""
    from specexport.checkpoint.source import hash_checkpoint

    entry = manifest.models[role]
    revision, runs_code = recorded_revision(manifest, role), bool(manifest.recipe.get("trust_remote_code"))
    if given is not None:
        found = hash_checkpoint(given, revision, remote_code=runs_code)
        if found != entry.source.sha256:
            raise CheckpointError(
                f"{_OPTIONS[role]} {given} is not what this {role} was built from: its sha256 is {found[:16]}…, the "
                f"manifest records {entry.source.sha256[:16]}… ({entry.source.name}).",
                f"give the checkpoint {entry.source.name} as it was at build time.",
            )
        return given
    for candidate in _candidates(entry.source, revision, bundle):
        try:
            if hash_checkpoint(candidate, revision, remote_code=runs_code) == entry.source.sha256:
                return candidate
        except CheckpointError:
            continue
    raise CheckpointNotFoundError(
        f"the {role}'s checkpoint {entry.source.name} (sha256 {entry.source.sha256[:16]}…) is not on this machine.",
        f"name its folder with {_OPTIONS[role]}, or a hub id to fetch it from.",
    )


def _candidates(recorded: SourceEntry, revision: str | None, bundle: Path) -> Iterator[str]:
    """Where a checkpoint may lie: never fetched, as a stranger's bundle may give the name."""
    from specexport.compile.places import find_remembered_place

    source = recorded.name
    if (place := find_remembered_place(recorded.sha256)) is not None and Path(place).exists():
        yield place
    for folder in dict.fromkeys((Path(), Path(os.path.abspath(bundle)).parent, bundle.resolve().parent)):
        if (folder / source).exists():
            yield str(folder / source)
    if "/" in source:
        from huggingface_hub import snapshot_download

        with contextlib.suppress(OSError, ValueError):  # it is not there, or the name is none
            yield snapshot_download(source, revision=revision, local_files_only=True)


class EagerModel(NamedTuple):
    """A checkpoint, and what makes of it the float model that an engine computes."""

    source: str
    # of the engine's weights: they are rounded to it and computed with in float32, so that only the engine's arithmetic
    # differs
    dtype: str
    revision: str | None = None  # on the hub
    trust_remote_code: bool = False  # let Python code from the checkpoint run
    dropped: Sequence[int] = ()  # layers that the engine was built without
    adapter: VerifiedAdapter | None = None  # changes the weights; None for none
    rope_len: int | None = None  # length that the engine's rotary tables were chosen for; None if none depends on it
    rounded: str | None = None  # dtype that the weights alone were rounded to; None for none


def eager_references(model: EagerModel, sequences: Sequence[Sequence[int]]) -> list[Float32Array]:
    """Logits [len, V] of each sequence from eager transformers; the model is freed before this returns."""
    from specexport.trace.check import compute_reference_logits

    checkpoint = _load(model)
    references = compute_reference_logits(checkpoint, [list(sequence) for sequence in sequences])
    del checkpoint
    gc.collect()
    return references


def eager_score(model: EagerModel, windows: Sequence[Sequence[int]], head: CutHead | None = None) -> TextScore:
    """What eager transformers makes of ``windows``; the model is freed before this returns."""
    from specexport.trace.check import compute_reference_logits

    checkpoint = _load(model)
    # One window at a time: the logits of a large vocabulary are kept for no longer than they are read.
    logits = (compute_reference_logits(checkpoint, [list(window)])[0] for window in windows)
    score = score_logits(logits, windows, head)
    del checkpoint, logits
    gc.collect()
    return score


def _load(model: EagerModel) -> "Checkpoint":
    from specexport.checkpoint.lengths import freeze_length
    from specexport.checkpoint.load import load_checkpoint, round_weights
    from specexport.checkpoint.lora_fit import merge_adapter, read_adapter
    from specexport.trace.prune import drop_layers

    adapter = model.adapter
    checkpoint = load_checkpoint(
        model.source, dtype=model.dtype, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    if model.rounded is not None:
        round_weights(checkpoint, model.rounded)
    if adapter is not None and adapter.source is not None:
        merge_adapter(checkpoint, read_adapter(adapter.source, checkpoint.model))
        if model.rounded is not None and adapter.chosen is None:  # in an engine too the sums are rounded
            round_weights(checkpoint, model.rounded)
    if model.rope_len is not None:
        freeze_length(checkpoint, model.rope_len)
    if model.dropped:
        drop_layers(checkpoint, model.dropped)
    widen_weights(checkpoint.model)
    return checkpoint


def widen_weights(model: Any) -> None:
    """Hold a torch model's parameters in float32, with the values that they have; a tensor at a time."""
    import torch

    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)


def recorded_revision(manifest: Manifest, role: str) -> str | None:
    """The hub revision that the recipe asked for."""
    revision = manifest.recipe.get(_REVISION_KEYS[role])
    return None if revision is None else str(revision)


def recorded_rounding(manifest: Manifest, role: str) -> str | None:
    """The dtype that the engine's float weights were rounded to, where it computes in another; None for none."""
    entry, dtype = manifest.models[role], manifest.recipe.get("dtype")
    return None if entry.quantize is not None or dtype in (None, entry.dtype) else str(dtype)
