"""What is remembered of drafters and of requests: how drafts fared, and when one that does not pay is tried again."""

from collections.abc import Sequence

from specexport_runtime.lookahead.acceptance import (
    GUESS,
    RequestAcceptance,
    SharedAcceptance,
    Sureness,
    shared_sureness,
)
from specexport_runtime.lookahead.trees import shared_chances
from specexport_runtime.requests.records import Proposal

_FEW_TESTS = 1.9  # two: they fade
_SHARE = 0.01
"""Seconds of probing for each second of plain decoding."""
_START_ROUNDS, _CREDIT_ROUNDS = 0.5, 8.0
"""Plain rounds whose time is there at the start, and that may be saved up: for a draft model that has to catch up."""
_FIRST, _AGAIN, _LONGEST = 16, 1, 1024  # rounds


class DrafterMemory:
    """What is remembered of one drafter over all requests of a kind: with a grammar, or without."""

    def __init__(self, num_slots: int, guess: float = GUESS) -> None:
        self.shared, self.sure = SharedAcceptance(num_slots, guess), shared_sureness()
        self.branches = shared_chances()
        self.budget = ProbeBudget()

    @property
    def is_unknown(self) -> bool:
        """Whether it was tested too little to know if it pays."""
        return self.shared.tests[0] < _FEW_TESTS


class ProbeBudget:
    """Seconds for drafts not expected to pay, 1 % of plain decoding's time; one a drafter, not one a request."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def earn(self, plain_seconds: float) -> None:
        """A round began; plain decoding would take so long for it."""
        if self._seconds is None:
            self._seconds = _START_ROUNDS * plain_seconds
        self._seconds = min(self._seconds + _SHARE * plain_seconds, _CREDIT_ROUNDS * plain_seconds)

    def spend(self, seconds: float) -> bool:
        """Take the cost of a probe from the budget; False if it does not suffice."""
        if self._seconds is None or seconds > self._seconds:
            return False
        self._seconds -= seconds
        return True


class ProbeTimer:
    """When a request tries a drafter again that it does without: after 16 rounds, then 32, 64 … while it fails.

    A probe that passes is soon followed by the next, so that a drafter that became good is not missed for long.
    ``is_probing``: one was drafted and not tested yet.
    """

    def __init__(self, now: int) -> None:
        self._last, self._wait, self.is_probing = now, _FIRST, False

    @property
    def due(self) -> int:
        """The round in which it is time."""
        return self._last + self._wait

    def is_due(self, now: int, *, early: bool = False) -> bool:
        """Whether it is time. ``early`` halves the wait: another request pays most of what a draft step costs."""
        return now - self._last >= (self._wait // 2 if early else self._wait)

    def note(self, now: int, *, passed: bool) -> None:
        """The drafter's draft was tested, as a probe or not."""
        self._last = now
        if not self.is_probing:
            self._wait = _FIRST
        else:
            self._wait = _AGAIN if passed else min(max(2 * self._wait, _FIRST), _LONGEST)
        self.is_probing = False


class StageMemory:
    """What is remembered of one drafter for one request."""

    def __init__(self, drafter: DrafterMemory, now: int) -> None:
        self.drafter, self.timer = drafter, ProbeTimer(now)
        self.acceptance, self.sure = RequestAcceptance(drafter.shared), Sureness(drafter.sure)
        self.slots: Sequence[int] = ()  # of the tokens that it may draft, or has drafted, in this round
        self.read = 0  # tokens of the request that a drafter with a separate cache has read
        # A copy's first token that was not tested, and its place: whether it would have passed is seen without a test.
        self.shadow: tuple[int, int] | None = None
        self.looked: Proposal | None = None  # with all branches that there were to choose from in this round
        self.copied: tuple[int, Sequence[float]] = (-1, ())  # the last copy's round and chances, for a trace
