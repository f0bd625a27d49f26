"""How likely a draft token passes its test, learned from tests that were performed.

A *slot* is what the chance depends on: for a model's draft the position in the draft, for a copied one how many tokens
matched before it (:func:`match_slots`). Counts fade with each new test of their slot, so that old text counts less.

A draft that was accepted as a block counts as one whose tokens were tested one by one: those that stay passed, the next
failed, and nothing is known of those after. That is without a bias, though the tests of a block depend on each other:
how often at least j tokens stay does not depend on how many follow (``sampling/block.py``). So of all drafts that reach
after j, whatever their lengths, the share of those that stay up to j-1 and stay up to j too is one number, and
:meth:`RequestAcceptance.reach`, the product of these shares, is how often j tokens stay.

Two levels. :class:`SharedAcceptance` knows all requests of a drafter and is the prior of each;
:class:`RequestAcceptance` is one request. Both shrink: a slot that was hardly tested is taken to fail as its
neighbour before it does, in a request as much more (or less) often than in others as that neighbour did.

Where a greedy draft ends before its length, every token more must be worth its step. How likely a draft token passes
goes by the probability that the draft gave it, as in Draft & Verify (Zhang et al. 2024, section 3.4, whose threshold
``DraftExit`` is): it is counted by slots of that probability. While the chance that all tokens so far pass is large,
the next one is drafted.
"""

from bisect import bisect_right
from collections.abc import Sequence

# Judged by test_replay.py's modelled seconds: the mean and the worst, of all its cases or a part.
GUESS, MODEL_GUESS = 0.4, 0.3
"""Failure rates before anything was tested: of any draft, and of a draft model that was chosen for its target.

Replayed: 0.4 for both is 0.1 % slower, and 3 % at worst.
"""
# Tests that what is expected beforehand weighs as much as. Replayed: 4 for both is 0.1 % slower, and 5 % at worst.
_SHARED_STRENGTH, _STRENGTH = 2.0, 6.0
# Weight that is left of a test when its slot is tested again. Replayed: 0.98 for both is 0.1 % slower, 3 % at worst.
_SHARED_MEMORY, _MEMORY = 0.99, 0.95
_LOWEST, _HIGHEST = 0.005, 0.98  # replayed: from 0.02 to 0.95 is 0.2 % slower, and 3 % at worst
# Failure rates below it hardly differ: 0.002 instead of 0.01 says nothing about the next slot. Replayed: without it
# 0.04 % slower, and 3 % at worst.
_SMALL = 0.05

# Classes of matches and of probabilities are as fine as their tests allow; recorded drafts have neither.
_MATCH_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
NUM_MATCH_SLOTS = len(_MATCH_BOUNDS) + 1
MAX_MATCH = 64

_BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)


def match_slots(lookahead: int) -> list[int]:
    """Slot of each match length from 0 to ``MAX_MATCH + lookahead``: a copy that passed m tokens matches m more."""
    return [sum(bound < length for bound in _MATCH_BOUNDS) for length in range(MAX_MATCH + lookahead + 1)]


class SharedAcceptance:
    """Failure rates of a drafter over all requests; ``tests`` and ``fails`` are faded, by slot, ``version`` counts."""

    def __init__(self, num_slots: int, guess: float = GUESS, before: tuple[Sequence[float], float] = ((), 0.0)) -> None:
        self._guess, (rates, weight) = guess, before
        self.tests = [weight] * num_slots
        self.fails = [weight * rate for rate in rates] or [0.0] * num_slots
        self.version = 0
        self._rates: list[float] | None = None

    def observe(self, slots: Sequence[int], accepted: int, *, rejected: bool) -> None:
        """Count tests: of ``slots``, the first ``accepted`` passed, and if ``rejected`` the next one failed."""
        _count(self.tests, self.fails, slots, accepted, rejected, _SHARED_MEMORY)
        self.version += 1
        self._rates = None

    @property
    def failure_rates(self) -> list[float]:
        """By slot."""
        if self._rates is None:
            rate, rates = self._guess, []
            for tests, fails in zip(self.tests, self.fails, strict=True):
                rate = (fails + _SHARED_STRENGTH * rate) / (tests + _SHARED_STRENGTH)
                rate = _LOWEST if rate < _LOWEST else _HIGHEST if rate > _HIGHEST else rate
                rates.append(rate)
            self._rates = rates
        return self._rates


class RequestAcceptance:
    """Failure rates of a drafter for one request."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self.shared = shared
        self._tests = [0.0] * len(shared.tests)
        self._fails = [0.0] * len(shared.tests)
        self._rates: list[float] = []
        self._known = -1

    def observe(self, slots: Sequence[int], accepted: int, *, rejected: bool) -> None:
        """Count tests, here and in what is shared; see ``SharedAcceptance.observe``."""
        _count(self._tests, self._fails, slots, accepted, rejected, _MEMORY)
        self.shared.observe(slots, accepted, rejected=rejected)

    @property
    def failure_rates(self) -> list[float]:
        """By slot."""
        if self._known != self.shared.version:
            ratio, rates = 1.0, []
            for prior, tests, fails in zip(self.shared.failure_rates, self._tests, self._fails, strict=True):
                rate = min(prior * ratio, _HIGHEST)
                if tests:
                    rate = (fails + _STRENGTH * rate) / (tests + _STRENGTH)
                ratio = (rate + _SMALL) / (prior + _SMALL)
                rates.append(rate)
            self._rates, self._known = rates, self.shared.version
        return self._rates

    def reach(self, slots: Sequence[int]) -> list[float]:
        """Probability that a draft is accepted at least up to each of its tokens, which have these slots."""
        rates, left, reached = self.failure_rates, 1.0, []
        for slot in slots:
            left *= 1.0 - rates[slot]
            reached.append(left)
        return reached


def _count(
    tests: list[float], fails: list[float], slots: Sequence[int], accepted: int, rejected: bool, memory: float
) -> None:
    for place, slot in enumerate(slots[: accepted + rejected]):
        tests[slot] = tests[slot] * memory + 1.0
        fails[slot] = fails[slot] * memory + (place == accepted)


def make_shared_confidence() -> SharedAcceptance:
    """What is known of all requests of a drafter."""
    failures = (0.8, 0.65, 0.5, 0.4, 0.3, 0.12, 0.08, 0.04, 0.02, 0.01)  # by slot, before anything was tested
    return SharedAcceptance(len(failures), before=(failures, 2.0))


class Confidence:
    """Ends drafts of one request."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._acceptance = RequestAcceptance(shared)
        self._slots: list[int] = []
        self.begin(())

    def begin(self, least: Sequence[float]) -> "Confidence":
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
