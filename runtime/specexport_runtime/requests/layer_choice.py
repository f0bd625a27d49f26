"""Which layers of the target make the draft of a prompt: pure functions of attention similarities and rules.

Metel et al. 2024, "Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity" (ASD), the Adaptive
Draft Model Generator. An attention layer that hardly turns the residual stream for this prompt hardly matters for it.
Or the same layers for every prompt, as a search on many found them (Draft & Verify, Zhang et al. 2024).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport_runtime.abi import ATTENTION, MLP, RECURRENCE
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import BoolArray

DEFAULT_THRESHOLD = 0.985
DEFAULT_PERIOD = 3
DEFAULT_KEEP_LAST = 2


@dataclass(frozen=True)
class LayerRules:
    """The rules that make a draft out of a target, None for off; a recurrence counts as a layer's attention."""

    # Alpha: attention layers with an average cosine similarity above it are removed.
    threshold: float | None = DEFAULT_THRESHOLD
    period: int | None = DEFAULT_PERIOD  # m, rule 1: attention and MLP of layers m, 2m, … (counted from 1) are removed
    keep_last: int | None = DEFAULT_KEEP_LAST  # l, rule 2: the last l layers stay whole, whatever the other rules say
    skip_mixers: tuple[int, ...] = ()  # layers (from 0) that go without their mixer, whatever the rules say
    skip_mlps: tuple[int, ...] = ()  # layers (from 0) that go without their MLP, likewise

    def __post_init__(self) -> None:
        if self.threshold is not None:
            object.__setattr__(self, "threshold", _check_fraction(self.threshold))
        _check_integer("period", self.period, low=2, why="1 would remove every layer and leave an empty draft")
        _check_integer("keep_last", self.keep_last, low=0, why="0 protects no layer")
        for name in ("skip_mixers", "skip_mlps"):
            object.__setattr__(self, name, _check_layer_numbers(name, getattr(self, name)))
        if self.threshold is None and self.period is None and not self.skips:
            raise InvalidRequestError(
                "threshold and period are both off, so no layer is removed and the draft is the target itself.",
                hint="give one of them, or draft another way.",
            )

    @property
    def is_blind(self) -> bool:
        """Whether every prompt gets the same layers: none need be measured on it."""
        return self.threshold is None

    @property
    def skips(self) -> tuple[int, ...]:
        """Layers that go without a part, whatever the rules say."""
        return (*self.skip_mixers, *self.skip_mlps)

    def check_layers(self, num_layers: int) -> None:
        """Refuse, by InvalidRequestError, rules that can make no draft of a model of N layers, whatever the prompt."""
        if self.skips:
            self._check_skips(num_layers)
            return
        removable = num_layers - (self.keep_last or 0)
        if removable <= 0:
            raise InvalidRequestError(
                f"keep_last is {self.keep_last}, and the model has {num_layers} layers: none may be removed.",
                hint=f"give at most {num_layers - 1}.",
            )
        if self.threshold is None and self.period is not None and self.period > removable:
            raise InvalidRequestError(
                f"period is {self.period}, and only the first {removable} of {num_layers} layers may be removed: "
                "the draft would be the target itself.",
                hint=f"give at most {removable}, or a threshold." if removable > 1 else "give a threshold.",
            )

    def _check_skips(self, num_layers: int) -> None:
        beyond = [layer for layer in self.skips if layer >= num_layers]
        if beyond:
            raise InvalidRequestError(
                f"layer {beyond[0]} is to be left out, and the model has layers 0 to {num_layers - 1}.",
                hint="give layers of this model.",
            )
        if len(self.skip_mixers) == len(self.skip_mlps) == num_layers:
            raise InvalidRequestError(
                f"all {num_layers} layers are left out, and nothing is left to draft with.", hint="keep some layers."
            )


@dataclass(frozen=True)
class LayerChoice:
    """The draft of one prompt."""

    mixers: tuple[bool, ...]  # of each layer, whether the draft keeps its mixer: attention, recurrences, or both
    mlp: tuple[bool, ...]  # of each layer, whether the draft keeps its MLP; False where it has none
    acs: tuple[float, ...] = ()  # average cosine similarity of each mixer over the prompt; empty: not measured
    kinds: tuple[str, ...] = ()  # [2N], each layer's mixer and MLP in turn (``abi.GateKind``); empty: attention and MLP

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.mixers)

    @property
    def mlps_off(self) -> int:
        """MLPs that the draft leaves out."""
        has = self.kinds[1::2] or (MLP,) * len(self.mlp)
        return sum(kind == MLP and not on for kind, on in zip(has, self.mlp, strict=True))

    @property
    def mask(self) -> BoolArray:
        """What runs in a draft step, bool [2N]: mixer of layer i at 2i, its MLP at 2i+1."""
        return np.array([self.mixers, self.mlp], dtype=np.bool_).T.reshape(-1)

    @property
    def removed_attention(self) -> tuple[int, ...]:
        """Layers (from 0) without their attention in the draft."""
        return self._removed(0, ATTENTION)

    @property
    def removed_recurrences(self) -> tuple[int, ...]:
        """Layers (from 0) without their recurrences in the draft."""
        return self._removed(0, RECURRENCE)

    @property
    def removed_mlp(self) -> tuple[int, ...]:
        """Layers (from 0) without their MLP in the draft."""
        return self._removed(1, MLP)

    @property
    def can_draft(self) -> bool:
        """Whether something was removed and something is left: a draft that equals the target saves nothing."""
        removed = (*self.removed_attention, *self.removed_recurrences, *self.removed_mlp)
        return bool(removed) and any((*self.mixers, *self.mlp))

    def _removed(self, place: int, part: str) -> tuple[int, ...]:
        """Layers that have a part, and whose draft has not: of the mixers (place 0), or of the MLPs (1)."""
        kinds = (self.kinds or (ATTENTION, MLP) * self.num_layers)[place::2]
        kept = (self.mixers, self.mlp)[place]
        return tuple(i for i, kind in enumerate(kinds) if part in kind and not kept[i])

    def to_json(self) -> dict[str, Any]:
        """As JSON types: numbers of removed layers (from 0), and the similarities (None for one that is no number)."""
        return {
            "num_layers": self.num_layers,
            "removed_attention": list(self.removed_attention),
            "removed_recurrences": list(self.removed_recurrences),
            "removed_mlp": list(self.removed_mlp),
            "acs": [value if math.isfinite(value) else None for value in self.acs],
        }


def choose_layers(
    acs: Sequence[float], rules: LayerRules, num_layers: int | None = None, kinds: tuple[str, ...] = ()
) -> LayerChoice:
    """ASD's Adaptive Draft Model Generator; ``acs`` are mean cosine similarities of each of the N mixers."""
    count = len(acs) if num_layers is None else num_layers
    if len(acs) != count and (len(acs) or rules.threshold is not None):
        raise ValueError(f"{len(acs)} similarities for {count} layers")
    protected = count - (rules.keep_last or 0)
    periodic = [rules.period is not None and (i + 1) % rules.period == 0 and i < protected for i in range(count)]
    # A similarity that is no number is above nothing: such a layer stays.
    similar = [rules.threshold is not None and acs[i] > rules.threshold and i < protected for i in range(count)]
    mixers_off = [p or s or i in rules.skip_mixers for i, (p, s) in enumerate(zip(periodic, similar, strict=True))]
    mlps_off = [p or i in rules.skip_mlps for i, p in enumerate(periodic)]
    return LayerChoice(
        mixers=tuple(not off for off in mixers_off),
        mlp=tuple(not off and (not kinds or kinds[2 * i + 1] == MLP) for i, off in enumerate(mlps_off)),
        acs=tuple(float(value) for value in acs),
        kinds=kinds,
    )


def _check_layer_numbers(name: str, layers: Iterable[int]) -> tuple[int, ...]:
    found = tuple(layers)
    for layer in found:
        _check_integer(f"a layer of {name}", layer, low=0, why="layers are counted from 0")
    return tuple(sorted(set(found)))


def _check_fraction(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidRequestError(f"threshold is {value!r}, which is not a number.", hint="give a number in (0, 1].")
    if not 0 < value <= 1:
        raise InvalidRequestError(f"threshold is {value:g}.", hint="give a number in (0, 1]; None turns it off.")
    return float(value)


def _check_integer(name: str, value: int | None, *, low: int, why: str) -> None:
    if value is None:
        return
    wanted = f"give an integer of at least {low} ({why}); None turns the rule off."
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}, which is not an integer.", hint=wanted)
    if value < low:
        raise InvalidRequestError(f"{name} is {value}.", hint=wanted)
