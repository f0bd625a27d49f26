"""No drafting: plain decoding is the same loop with this drafter."""

from collections.abc import Sequence as Seq

from specexport_runtime.drafters.base import Proposal
from specexport_runtime.sequence import Sequence


class NoDrafter:
    """Proposes nothing, so every round is one token of the target's own."""

    engine_seconds = 0.0

    def propose(self, sequences: Seq[Sequence], lookaheads: Seq[int]) -> list[Proposal]:  # noqa: ARG002 protocol
        """An empty proposal for each sequence."""
        return [Proposal([]) for _ in sequences]

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing to forget."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def release_row(self, row: int) -> None:
        """Nothing to drop."""
