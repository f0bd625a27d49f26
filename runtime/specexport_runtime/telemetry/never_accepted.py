"""Drafts that are never accepted, said once: it does not show in the texts, which are right, only in the time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from specexport_runtime.requests.records import FORCED
from specexport_runtime.requests.stats import UNNAMED, DraftCounts, get_or_add_counts

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request
    from specexport_runtime.telemetry.observers import RoundRecord


class NeverAccepted:
    """Says of each drafter once, by ``say`` in the decoding thread, that nothing that it drafted was accepted."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._counts: dict[str, DraftCounts] = {}
        self._settled: set[str] = set()

    def on_round(self, record: "RoundRecord") -> None:
        """Look at the drafts of a step."""
        for event in record.events:
            drafter = event.proposal.drafter or UNNAMED
            shares = event.proposal.shares(event.accepted, event.on_chain)
            own = next((share for share in shares if share.drafter != FORCED), None)
            if own is None or not event.tokens or drafter in self._settled:
                continue
            counts = get_or_add_counts(self._counts, drafter)
            counts.add(own.drafted, own.accepted)
            if counts.accepted:
                self._settled.add(drafter)
            elif counts.never_accepted:
                self._settled.add(drafter)
                self._say(describe(drafter, counts.drafted))

    def on_finish(self, request: "Request") -> None:
        """Nothing: rounds say it all."""


def describe(drafter: str, drafted: int) -> str:
    """What it means that none of ``drafted`` tokens of ``drafter`` was accepted, and what to do."""
    return (
        f"drafter {drafter}: none of its first {drafted} draft tokens was accepted. The texts are right, and drafting "
        "only costs time: it does not fit this target (another checkpoint, damaged or badly quantized weights, too few "
        "layers) or these texts. Fix: run `specexport verify` on the bundle, ask for another drafter, or for none."
    )
