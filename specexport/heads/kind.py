"""A kind of draft head, as one record: what the compiler asks of each. ``kinds`` lists them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.backends.base import HeadNeed
from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import HeadFiles
from specexport.heads.files import our_name as plain_name
from specexport.heads.loaded import LoadedHead, TargetTables
from specexport.heads.reference import HeadReference
from specexport.trace.export import TracedModel
from specexport_runtime.abi import AFTER_NORM

Caches = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, H, n, D] of each cache of the target that a head reads, in the order of its configuration."""

SWAPPED = "embedding and feature joined in the other order"
BEFORE_NORM = "the hidden state before the last norm"
AFTER_LAST = "the hidden state after the last norm"


class Reading(NamedTuple):
    """One way to read a head's files."""

    config: HeadConfig  # what it would compute
    change: str = ""  # how it differs from what the files say; empty for that itself


def read_logits(model: Any, ids: Tensor, config: HeadConfig) -> tuple[Tensor, Caches]:  # noqa: ARG001
    """The target's logits [T, V] of a text of token ids [1, T], and no cache of it."""
    return model(input_ids=ids, use_cache=False).logits[0], ()


@dataclass(frozen=True)
class HeadKind:
    """One kind of draft head. All functions may raise what a checkpoint is refused by."""

    name: str  # in manifests and reports
    called: str  # in sentences: "an MTP module"
    # whether files are of this kind, where they do not say so by a name of speculators; earlier kinds are asked first
    recognizes: Callable[[HeadFiles], bool]
    # what it computes; CheckpointError if it was made for another target, UnsupportedModelError for a variant
    read: Callable[[HeadFiles, TargetFacts], HeadConfig]
    load: Callable[[HeadFiles, HeadConfig, TargetTables, torch.dtype], LoadedHead]
    # its graph, by ``head, fixed_sizes, group_experts``: see ``kinds.trace_head``
    trace: Callable[..., TracedModel]
    # what its engine is checked against, in the published equations
    reference: Callable[[LoadedHead], HeadReference]
    # logits [n, N] of the first guesses and of the second, and the places of the text after which they are: of its
    # tokens int64 [T], the features [T-1, E] of all but the last, and the caches that it reads
    guesses: Callable[[LoadedHead, Tensor, Tensor, Caches], Iterator[tuple[Tensor, slice]]]
    # ways to read its files, by the number of the target's layers: what they leave open, or may say wrongly; their own
    # first
    readings: Callable[[HeadConfig, int], Sequence[Reading]] = lambda config, _: [Reading(config)]
    read_target: Callable[[Any, Tensor, HeadConfig], tuple[Tensor, Caches]] = read_logits
    needs: frozenset[HeadNeed] = frozenset()  # of a backend
    speculators: tuple[str, ...] = ()  # names that speculators has for it
    our_name: Callable[[str], str | None] = plain_name  # of a tensor in a folder of speculators
    prefixes: tuple[str, ...] = ()  # what writers put before the names of its tensors
    # of a kind that can be trained and written: a module without weights, speculators' class, its names of tensors
    make: Callable[[HeadConfig], Any] | None = None
    architecture: str | None = None
    stored_name: Callable[[str], str] = str


def list_state_readings(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    """Of heads that read one hidden state: those beside it; after the last comes that after the norm."""
    told, tap = {num_layers: BEFORE_NORM, AFTER_NORM: AFTER_LAST}, config.taps[0]
    beside = [*([tap - 1] if tap else []), tap + 1 if tap < num_layers else AFTER_NORM]
    others = [num_layers] if tap == AFTER_NORM else beside
    named = [(other, told.get(other, f"hidden state {other} in the place of {tap}")) for other in others]
    return [Reading(config), *(Reading(replace(config, taps=(other,)), change) for other, change in named)]


def shifted_taps(config: HeadConfig, num_layers: int) -> list[Reading]:
    """All hidden states one layer earlier, and one later."""
    moved = [tuple(tap + shift for tap in config.taps) for shift in (-1, 1)]
    return [
        Reading(replace(config, taps=taps), f"hidden states {list(taps)} in the place of {list(config.taps)}")
        for taps in moved
        if all(0 <= tap <= num_layers for tap in taps)
    ]


def reversed_taps(config: HeadConfig) -> list[Reading]:
    """The hidden states joined the other way round."""
    taps = config.taps[::-1]
    return [Reading(replace(config, taps=taps), f"hidden states in the order {list(taps)}")] if len(taps) > 1 else []


def swapped_reading(config: HeadConfig) -> Reading:
    """Embedding and feature in the other order."""
    return Reading(replace(config, feature_first=not config.feature_first), SWAPPED)


def flipped_flag_reading(config: HeadConfig, name: str) -> Reading:
    """A switch of the configuration turned over."""
    other = not getattr(config, name)
    changes: dict[str, Any] = {name: other}
    return Reading(replace(config, **changes), f"{name} {str(other).lower()}")
