"""What drafting costs, as the goodput controller asks for it: one entry for each drafter that a plan may name."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.step_cost import StepCost
from specexport_runtime.sequences.layer_choice import LayerChoice
from specexport_runtime.sequences.records import DrafterTraits

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

_USUAL_BACKLOG = 2
_LIKELY_SHARE = 2 / 3  # of the layers, in a draft whose layers were not chosen yet


class DraftCost(Protocol):
    """Seconds of a drafter's steps. They must be fixed when the engine is loaded (``RandomStream`` says why)."""

    def key(self, sequences: "Seq[Sequence]") -> Any:
        """What the seconds depend on besides rows and cache entries, hashable: equal keys, equal seconds."""
        ...

    def seconds(self, key: Any, num_rows: int, kv_entries: float) -> float:
        """Seconds of one draft step of ``num_rows`` rows that see ``kv_entries`` cache entries together."""
        ...

    def catch_up_seconds(self, backlog: int) -> float:
        """Seconds for reading ``backlog`` tokens of a sequence, besides what a usual step reads."""
        ...

    def round_seconds(self, num_rows: int) -> float:
        """Seconds that a draft of any length costs a sequence, of ``num_rows``, in every round, besides its steps."""
        ...


class WeighedDrafter(NamedTuple):
    """A drafter, as far as its drafts are weighed.

    Attributes:
        traits: what it is like.
        cost: what its steps cost; None if it is free, or if nobody knows.
    """

    traits: DrafterTraits
    cost: DraftCost | None = None


class EngineCost:
    """The cost of a drafter with an engine of its own.

    Args:
        curve: a step of the engine.
        shares_cache: its cache is the target's, so it never has to catch up.
    """

    def __init__(self, curve: StepCost, *, shares_cache: bool = False) -> None:
        self._curve = curve
        self._shares_cache = shares_cache

    def key(self, sequences: "Seq[Sequence]") -> Any:  # noqa: ARG002
        """See ``DraftCost.key``: nothing."""
        return ()

    def seconds(self, key: Any, num_rows: int, kv_entries: float) -> float:  # noqa: ARG002
        """See ``DraftCost.seconds``."""
        return self._curve.seconds(num_rows, num_rows, kv_entries)

    def catch_up_seconds(self, backlog: int) -> float:
        """See ``DraftCost.catch_up_seconds``; the drafter always has one or two tokens to read."""
        if self._shares_cache or backlog <= _USUAL_BACKLOG:
            return 0.0
        return max(self._curve.seconds(backlog, 1, backlog / 2) - self._curve.seconds(1, 1), 0.0)

    def round_seconds(self, num_rows: int) -> float:  # noqa: ARG002
        """See ``DraftCost.round_seconds``: all of it is in the steps."""
        return 0.0


class ParallelCost:
    """The cost of a drafter that drafts all tokens of a sequence in one step.

    The step is paid once a round, and each token of the draft is one token more in it.

    Args:
        curve: a step of the engine.
    """

    def __init__(self, curve: StepCost) -> None:
        self._curve = curve

    def key(self, sequences: "Seq[Sequence]") -> Any:  # noqa: ARG002
        """See ``DraftCost.key``: nothing."""
        return ()

    def seconds(self, key: Any, num_rows: int, kv_entries: float) -> float:  # noqa: ARG002
        """See ``DraftCost.seconds``: what one token more a row costs."""
        if not num_rows:
            return 0.0
        wide, narrow = (self._curve.seconds(count * num_rows, num_rows, kv_entries) for count in (2, 1))
        return max(wide - narrow, 0.0)

    def catch_up_seconds(self, backlog: int) -> float:
        """See ``DraftCost.catch_up_seconds``; as with a drafter that drafts token by token."""
        return EngineCost(self._curve).catch_up_seconds(backlog)

    def round_seconds(self, num_rows: int) -> float:
        """See ``DraftCost.round_seconds``: its part of the step that all rows share."""
        return self._curve.seconds(num_rows, num_rows) / max(num_rows, 1)


class LayersCost:
    """The cost of drafting with some of the target's own layers.

    Args:
        curves: what steps cost.
        choice_of: the layers that were chosen for a sequence; None while they are not.
    """

    def __init__(self, curves: CostCurves, choice_of: "Callable[[Sequence], LayerChoice | None]") -> None:
        self._curves, self._choice_of = curves, choice_of

    def key(self, sequences: "Seq[Sequence]") -> tuple[int, int, int]:
        """Mixers and MLPs that are on, on average, and how many different choices there are."""
        choices = {choice for seq in sequences if (choice := self._choice_of(seq)) is not None}
        if not choices:
            gates = self._curves.gates
            if gates is None:
                return 0, 0, 1
            mlps = gates.num_layers if gates.num_mlps is None else gates.num_mlps
            return round(_LIKELY_SHARE * gates.num_layers), round(_LIKELY_SHARE * mlps), 1
        mixers = sum(sum(choice.mixers) for choice in choices) / len(choices)
        mlp = sum(sum(choice.mlp) for choice in choices) / len(choices)
        groups = len({(choice.mixers, choice.mlp) for choice in choices})
        return round(mixers), round(mlp), groups

    def seconds(self, key: Any, num_rows: int, kv_entries: float) -> float:
        """See ``DraftCost.seconds``. Sequences with different layers draft one after another."""
        mixers, mlp, different = key
        groups = min(int(different), num_rows)
        each = -(-num_rows // groups)
        return groups * self._curves.self_draft_seconds(mixers, mlp, each, each, kv_entries / groups)

    def catch_up_seconds(self, backlog: int) -> float:  # noqa: ARG002
        """See ``DraftCost.catch_up_seconds``: the cache is the target's, nothing was missed."""
        return 0.0

    def round_seconds(self, num_rows: int) -> float:  # noqa: ARG002
        """See ``DraftCost.round_seconds``: all of it is in the steps."""
        return 0.0
