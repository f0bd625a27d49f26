"""What drafting costs, as the controller asks for it: one entry for each drafter that a plan may name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.costs.curves import StepCost
from specexport_runtime.requests.records import DrafterTraits

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request

_USUAL_BACKLOG = 2  # tokens that a drafter always has to read


class DraftCost:
    """Seconds of a drafter's steps, fixed when the engine is loaded."""

    def seconds(self, requests: "Sequence[Request]", num_rows: int, kv_entries: float) -> float:
        """Seconds of one draft step in ``num_rows`` rows of those that may draft, which see so many cache entries."""
        raise NotImplementedError

    def catch_up_seconds(self, backlog: int) -> float:  # noqa: ARG002
        """Seconds for reading ``backlog`` tokens of a request, besides what a usual step reads."""
        return 0.0

    def round_seconds(self, num_rows: int) -> float:  # noqa: ARG002
        """Seconds that a draft of any length costs a request, of ``num_rows``, in every round, besides its steps."""
        return 0.0


class WeighedDrafter(NamedTuple):
    """A drafter, as far as its drafts are weighed; ``cost`` is None if it is free, or not known."""

    traits: DrafterTraits
    cost: DraftCost | None = None


class EngineCost(DraftCost):
    """The cost of a drafter with a separate engine; one that ``shares_cache`` with the target never catches up."""

    def __init__(self, curve: StepCost, *, shares_cache: bool = False) -> None:
        self._curve, self._shares_cache = curve, shares_cache

    def seconds(self, requests: "Sequence[Request]", num_rows: int, kv_entries: float) -> float:  # noqa: ARG002
        """See ``DraftCost.seconds``."""
        return self._curve.seconds(num_rows, num_rows, kv_entries)

    def catch_up_seconds(self, backlog: int) -> float:
        """See ``DraftCost.catch_up_seconds``."""
        if self._shares_cache or backlog <= _USUAL_BACKLOG:
            return 0.0
        return self._curve.seconds(backlog, 1, backlog / 2) - self._curve.seconds(1, 1)
