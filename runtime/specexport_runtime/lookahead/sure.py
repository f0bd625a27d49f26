"""Where a greedy draft ends before its length: every token more must be worth its step.

How likely a draft token passes goes by the probability that the draft gave it, as in Draft & Verify (Zhang et al. 2024,
section 3.4, whose threshold ``DraftExit`` is): it is counted by slots of that probability. While the chance that all
tokens so far pass is large, the next one is drafted.
"""

from bisect import bisect_right
from collections.abc import Sequence as Seq

from specexport_runtime.lookahead.acceptance import SequenceAcceptance, SharedAcceptance

_BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)


def shared_sureness() -> SharedAcceptance:
    """What is known of all sequences of a drafter."""
    failures = (0.8, 0.65, 0.5, 0.4, 0.3, 0.12, 0.08, 0.04, 0.02, 0.01)  # by slot, before anything was tested
    return SharedAcceptance(len(failures), before=(failures, 2.0))


class Sureness:
    """Ends drafts of one sequence."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._acceptance = SequenceAcceptance(shared)
        self._slots: list[int] = []
        self.begin(())

    def begin(self, least: Seq[float]) -> "Sureness":
        """A draft begins; ``least[k]`` is the chance that its k tokens pass from which one more is worth its step."""
        self._slots, self._reached, self._least = [], 1.0, least
        return self

    def should_end(self, top_probability: float) -> bool:
        """Whether the draft ends with the token just drafted, to which it gave this probability."""
        self._slots.append(slot := bisect_right(_BOUNDS, top_probability))
        self._reached *= 1.0 - self._acceptance.failure_rates[slot]
        done = len(self._slots)
        return done < len(self._least) and self._reached < self._least[done]

    def observe(self, accepted: int, *, rejected: bool) -> None:
        """What became of the draft; of its last token nothing was asked if it reached its length."""
        known = len(self._slots)
        self._acceptance.observe(self._slots, min(accepted, known), rejected=rejected and accepted < known)
