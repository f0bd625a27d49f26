"""What the goodput controller remembers of drafters and of sequences."""

from collections.abc import Sequence as Seq

from specexport_runtime.lookahead.acceptance import GUESS, SequenceAcceptance, SharedAcceptance
from specexport_runtime.lookahead.probing import ProbeBudget, ProbeTimer

_FEW_TESTS = 1.9  # two: they fade


class DrafterMemory:
    """What is remembered of one drafter over all sequences of a kind: with a grammar, or without.

    Args:
        num_slots: of its acceptance.
        guess: see ``SharedAcceptance``.
    """

    def __init__(self, num_slots: int, guess: float = GUESS) -> None:
        self.shared = SharedAcceptance(num_slots, guess)
        self.budget = ProbeBudget()

    @property
    def is_unknown(self) -> bool:
        """Whether it was tested too little to know if it pays."""
        return self.shared.tests[0] < _FEW_TESTS


class StageMemory:
    """What is remembered of one drafter for one sequence.

    Args:
        drafter: what is known of it.
        now: number of the round.

    Attributes:
        drafter: what is known of it.
        acceptance: how its drafts fared.
        timer: when it is tried again.
        slots: of the tokens that it may draft, or has drafted, in this round.
        known: tokens of the sequence that a drafter with a cache of its own has read.
        shadow: first token of a copy that was not tested, and its place in the draft: whether it would have passed is
            seen without a test.
        bypassed: under which circumstances it was last decided not to draft; None if it was decided to.
        probe_seconds: what the budget refused for a probe then; 0 if it was not asked.
    """

    def __init__(self, drafter: DrafterMemory, now: int) -> None:
        self.drafter = drafter
        self.acceptance = SequenceAcceptance(drafter.shared)
        self.timer = ProbeTimer(now)
        self.slots: Seq[int] = ()
        self.known = 0
        self.shadow: tuple[int, int] | None = None
        self.bypassed: tuple[int, ...] | None = None
        self.probe_seconds = 0.0

    def stays_bypassed(self, circumstances: tuple[int, ...], now: int) -> bool:
        """Whether nothing has changed since it was decided not to draft, and it is not time to try."""
        if self.bypassed != circumstances:
            return False
        return not self.timer.is_due(now) or self.probe_seconds > (self.drafter.budget.seconds or 0.0)

    def start_probe(self) -> None:
        """It is tried in this round."""
        self.timer.start()
