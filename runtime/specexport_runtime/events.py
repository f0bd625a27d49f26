"""What a decoding round did for one sequence."""

from typing import NamedTuple

from specexport_runtime.drafters.base import Proposal
from specexport_runtime.sequence import Sequence


class RoundEvent(NamedTuple):
    """What one round did for one sequence.

    Attributes:
        sequence: the sequence; its ``finish_reason`` says whether it is done.
        tokens: tokens committed: ``accepted`` draft tokens, then the target's own (unless the text ended before it);
            none if it failed.
        drafted: draft tokens tested.
        accepted: of these, accepted and committed.
        is_bonus: the target's own token follows a fully accepted draft; otherwise it corrects the draft.
        proposal: the draft itself.
        gamma: threshold that the draft was made with; None if it had none.
    """

    sequence: Sequence
    tokens: list[int]
    drafted: int
    accepted: int
    is_bonus: bool
    proposal: Proposal = Proposal([])
    gamma: float | None = None
