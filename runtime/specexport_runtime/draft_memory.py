"""What the goodput controller remembers of drafters and of sequences."""

from collections.abc import Sequence as Seq

from specexport_runtime.draft_acceptance import SequenceAcceptance, SharedAcceptance
from specexport_runtime.draft_probing import ProbeBudget, ProbeTimer


class DrafterMemory:
    """What is remembered of one drafter over all sequences.

    Args:
        num_slots: of its acceptance.
    """

    def __init__(self, num_slots: int) -> None:
        self.shared = SharedAcceptance(num_slots)
        self.budget = ProbeBudget()


class StageMemory:
    """What is remembered of one drafter for one sequence.

    Args:
        drafter: what is known of it.
        now: number of the round.

    Attributes:
        acceptance: how its drafts fared.
        timer: when it is tried again.
        slots: of the tokens that it may draft, or has drafted, in this round.
        known: tokens of the sequence that a drafter with a cache of its own has read.
        shadow: first token of a copy that was not tested: whether it would have passed is seen without a test.
    """

    def __init__(self, drafter: DrafterMemory, now: int) -> None:
        self.acceptance = SequenceAcceptance(drafter.shared)
        self.timer = ProbeTimer(now)
        self.slots: Seq[int] = ()
        self.known = 0
        self.shadow: int | None = None

    def start_probe(self) -> None:
        """It is tried in this round."""
        self.acceptance.fade()
        self.timer.start()
