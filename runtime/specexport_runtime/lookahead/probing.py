"""When a drafter that does not pay is tried again, so cheaply that it cannot matter."""

_SHARE = 0.01
"""Seconds of probing for each second of plain decoding."""
_FIRST, _AGAIN, _LONGEST = 16, 1, 1024
_START_ROUNDS = 0.5  # plain rounds whose time is there at the start
_CREDIT_ROUNDS = 8.0  # plain rounds whose time may be saved up for a probe that is dear: a draft model catching up


class ProbeBudget:
    """Seconds that may be spent on drafts that are not expected to pay: 1 % of the time that plain decoding takes.

    One budget a drafter, whoever shares the batch: sixteen sequences that each try now and then must not add up to a
    draft step in every round. It starts with little, and cannot be saved up for ever.

    Attributes:
        seconds: what is left; None before the first round.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None

    def earn(self, plain_seconds: float) -> None:
        """A round began; plain decoding would take so long for it."""
        if self.seconds is None:
            self.seconds = _START_ROUNDS * plain_seconds
        self.seconds = min(self.seconds + _SHARE * plain_seconds, _CREDIT_ROUNDS * plain_seconds)

    def spend(self, seconds: float) -> bool:
        """Take the cost of a probe from the budget; False if it does not suffice."""
        if self.seconds is None or seconds > self.seconds:
            return False
        self.seconds -= seconds
        return True


class ProbeTimer:
    """When a sequence tries a bypassed drafter again: after 16 rounds, then 32, 64 … while it fails.

    A probe that passes is soon followed by the next, so that a drafter that became good is not missed for long.

    Args:
        now: number of the round.
    """

    def __init__(self, now: int) -> None:
        self._last = now
        self._wait = _FIRST
        self._is_probing = False

    @property
    def is_probing(self) -> bool:
        """Whether a probe was drafted and not tested yet."""
        return self._is_probing

    @property
    def due(self) -> int:
        """The round in which it is time, if no other sequence probes before."""
        return self._last + self._wait

    def is_due(self, now: int, *, early: bool = False) -> bool:
        """Whether it is time. ``early`` halves the wait: another sequence pays most of what a draft step costs."""
        return now - self._last >= (self._wait // 2 if early else self._wait)

    def start(self) -> None:
        """A probe is drafted in this round."""
        self._is_probing = True

    def note(self, now: int, *, passed: bool) -> None:
        """The drafter's draft was tested, as a probe or not."""
        self._last = now
        if not self._is_probing:
            self._wait = _FIRST
        elif passed:
            self._wait = _AGAIN
        else:
            self._wait = min(max(2 * self._wait, _FIRST), _LONGEST)
        self._is_probing = False
