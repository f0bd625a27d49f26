"""The layers that drafts of a target leave out, as ``specexport bench --search-layers`` found them.

They lie in a file of the bundle that the manifest lists with its hash, so that a search changes nothing else.
"""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

from specexport_runtime.abi import MLP, Size
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD, LayerNumber, ModelEntry, Ratio
from specexport_runtime.bundle.manifest import Manifest
from specexport_runtime.errors import BundleError
from specexport_runtime.schema import from_json, whole

DRAFT_LAYERS_NAME = "draft_layers.json"


class DraftLayers(NamedTuple):
    """Parts of a target that its drafts leave out, and what that promised on the texts of the search."""

    num_layers: Size  # of the target
    mixers: tuple[LayerNumber, ...]  # layers (from 0) without their mixer: attention, recurrences, or both
    mlps: tuple[LayerNumber, ...]  # layers (from 0) without their MLP
    lookahead: Annotated[int, whole(1, MAX_LOOKAHEAD)]  # K that promised most
    tokens_a_round: Ratio  # with drafts of K tokens, the target's own included
    speedup: Ratio  # over plain decoding
    num_tokens: Size  # that were to be guessed

    def describe(self) -> str:
        """What drafts leave out, and what that promised, in one line."""
        mixers, mlps = (", ".join(map(str, part)) or "none" for part in (self.mixers, self.mlps))
        return (
            f"its own drafts go without the mixers of layers {mixers} and the MLPs of layers {mlps}: "
            f"{self.tokens_a_round:.2f} tokens a round with K={self.lookahead}, {self.speedup:.2f}x plain decoding, "
            f"on {self.num_tokens} tokens"
        )


def load_draft_layers(folder: Path, manifest: Manifest) -> DraftLayers | None:
    """What a search left in a bundle, None if there was none; BundleError if it is not of this target."""
    if DRAFT_LAYERS_NAME not in manifest.files:
        return None
    path = folder / DRAFT_LAYERS_NAME
    fix = "search again with `specexport bench --search-layers`, or build the bundle again."
    try:
        found = from_json(DraftLayers, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # a misfit is a ValueError
        raise BundleError(f"{path} cannot be read ({error}).", fix) from error
    if (problem := _problem(found, manifest.models.get("target"))) is not None:
        raise BundleError(f"{path}: {problem}.", fix)
    return found


def _problem(found: DraftLayers, entry: ModelEntry | None) -> str | None:
    """Why no drafts of a target can leave these layers out."""
    kinds = () if entry is None else entry.engine.gates.kinds
    if len(kinds) != 2 * found.num_layers:
        return f"it is of a target of {found.num_layers} layers, and {len(kinds) // 2} of this one can be left out"
    off = {*(2 * layer for layer in found.mixers), *(2 * layer + 1 for layer in found.mlps)}
    there = {gate for gate, kind in enumerate(kinds) if kind}
    if missing := sorted(off - there):
        part = MLP if missing[0] % 2 else "mixer"
        return f"it leaves out the {part} of layer {missing[0] // 2}, and there is none"
    if not off or off == there:
        return "it leaves out everything" if off else "it leaves out nothing"
    return None
