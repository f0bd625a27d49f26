"""Drafts of what a grammar forces: the tokens that a text goes on with, whatever the target thinks of them.

They are drafts like any other, tested against the masked distribution: where the mask leaves one token it is accepted,
and where the same text could be cut into other tokens the target decides. So the law is exact, and a step is saved for
each token that is accepted.
"""

from collections.abc import Sequence as Seq

from specexport_runtime.drafters.base import DrafterTraits
from specexport_runtime.sequences.records import Proposal
from specexport_runtime.sequences.sequence import Sequence

FORCED = "forced"
"""Name of this drafter in draft plans. Requests do not name it: those with a grammar that draft at all have it."""
FORCED_LOOKAHEAD = 16
"""Forced tokens that are tested at a time, if the engine was built for so many."""


class ForcedDrafter:
    """Draft tokens that the grammar of a sequence forces; none for a sequence without a grammar."""

    traits = DrafterTraits(default_lookahead=FORCED_LOOKAHEAD, is_free=True)
    engine_seconds = 0.0

    def propose(self, sequences: Seq[Sequence], lookaheads: Seq[int]) -> list[Proposal]:
        """Up to ``lookaheads[i]`` tokens for each sequence; see ``Drafter.propose``."""
        return [_forced(seq, most) for seq, most in zip(sequences, lookaheads, strict=True)]

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing: the grammar belongs to the sequence."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def release_row(self, row: int) -> None:
        """Nothing to drop."""


def _forced(seq: Sequence, most: int) -> Proposal:
    grammar = seq.sampler.grammar
    try:
        tokens = [] if grammar is None or most <= 0 else grammar.forced(most)
    except Exception as error:  # whatever it is, it concerns this sequence alone
        return Proposal([], None, "none", FORCED, error=error)
    return Proposal(tokens, None, "lookahead" if len(tokens) == most else "text", FORCED) if tokens else _NOTHING


_NOTHING = Proposal([], end="none")
