"""The one feature that some drafters read: that of the token before the newest."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from specexport_runtime.drafters.base import HEAD
from specexport_runtime.drafters.own_cache import OwnCacheDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sequences.sequence import Sequence

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.lookahead.draft_cost import DraftCost


class _Last(NamedTuple):
    """Features of a sequence's last tokens: the one that a draft is made of is among them."""

    start: int
    features: Float32Array


class LastFeatures:
    """Keeps, of each sequence, the features that its next draft may be made of.

    By sequence, not by row: nothing to do when rows move, and a dropped sequence takes its features along. Nor is there
    anything to do when drafts are rejected: which feature counts follows from how many tokens the sequence has.
    """

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Sequence, _Last] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, sequence: Sequence, start: int, features: Float32Array) -> None:
        """Keep the feature of the last token that is known now, or of a draft token behind it.

        ``features`` [t, E] are of the tokens that the target has just read, from position ``start`` on; they are
        copied.
        """
        first = max(start, len(sequence.tokens) - 1)
        if first < start + len(features):
            self._last[sequence] = _Last(first, features[first - start :].copy())

    def of(self, sequence: Sequence) -> Float32Array:
        """The feature [E] of the token before the newest; SpecexportError if the target gave none."""
        last, at = self._last.get(sequence), len(sequence.tokens) - 2
        if last is None or not last.start <= at < last.start + len(last.features):
            raise SpecexportError("the target gave no features of this sequence.")
        feature: Float32Array = last.features[at - last.start]
        return feature


class LastFeatureDrafter(OwnCacheDrafter):
    """The part of a drafter whose head reads no other feature, and has no cache; ``named``: see its base class."""

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        self._last = LastFeatures()

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether the head may be asked for this sequence; see ``FeatureDrafter.wants_features``."""
        return any(stage.drafter == HEAD for stage in sequence.draft_plan)

    def note_features(self, sequence: Sequence, start: int, features: Float32Array) -> None:
        """Keep what the next draft may be made of; see ``FeatureDrafter.note_features``."""
        self._last.note(sequence, start, features)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing: which of the features counts is told by how many tokens the sequence has."""

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """See ``CostedDrafter.cost``."""
        from specexport_runtime.lookahead.draft_cost import EngineCost

        curve = curves.drafters.get(HEAD)
        return None if curve is None else EngineCost(curve, shares_cache=True)
