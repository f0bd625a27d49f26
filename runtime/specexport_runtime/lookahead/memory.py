"""What is remembered of drafters and of requests: how drafts fared, and when one that does not pay is tried again."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from specexport_runtime.lookahead.acceptance import (
    GUESS,
    Confidence,
    RequestAcceptance,
    SharedAcceptance,
    make_shared_confidence,
)
from specexport_runtime.lookahead.trees import make_shared_chances
from specexport_runtime.requests.records import Proposal

# Judged by test_replay.py's modelled seconds: the mean and the worst, of all its cases or a part.
_FEW_TESTS = 1.9  # two: they fade. Replays know no costs before; for those that do, see test_goodput.py
_SHARE = 0.01
"""Of the time of plain decoding, what a drafter that does not pay may cost: docs/adaptive.md promises it."""
_START, _MOST, _LEAST = 0.5, 8.0, -32.0
"""Plain rounds that a drafter may lose at first, once it has gained them, and after which its losses do not add up.

Replayed: 8 at first is 0.1 % slower, 5 % at worst; 32 later 0.04 %, and 2 %; from 8 on not adding up changes nothing.
"""
_KEPT = 8.0
"""Tests as which a life counts in the next at most. Replayed: that they fade besides, or not, is 0.01 %."""
_WAIT = 16  # rounds between two tries. Replayed: 4 and 64 are the same, for the account decides


class DrafterMemory:
    """What is remembered of one drafter over all requests of a kind: with a grammar, or without.

    ``kept`` is what :meth:`to_json` gave in an earlier life; what does not fit is ignored.
    """

    def __init__(self, num_slots: int, guess: float = GUESS, *, kept: Any = None) -> None:
        self.shared, self.sure = SharedAcceptance(num_slots, guess), make_shared_confidence()
        self.branches = make_shared_chances()
        self.account = DraftAccount()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            tests, fails, balance = kept["tests"], kept["fails"], float(kept["account"])
            if (np.diff([[0 * balance] * num_slots, fails, tests], axis=0) >= 0).all():  # that of a NaN or inf is not
                self.shared.tests, self.shared.fails = np.clip([tests, fails], 0.0, _KEPT).tolist()
                self.account.balance = min(max(balance, _LEAST), _MOST)

    def to_json(self) -> dict[str, Any]:
        """What the next life may know: the account, and tests and failures by slot, of a bounded weight."""
        table = np.array([self.shared.tests, self.shared.fails])
        table *= _KEPT / np.maximum(table[0], _KEPT)
        return {"account": self.account.balance, "tests": table[0].tolist(), "fails": table[1].tolist()}

    @property
    def is_unknown(self) -> bool:
        """Whether it was tested too little to know if it pays."""
        return self.shared.tests[0] < _FEW_TESTS


class DraftAccount:
    """What a drafter gained and lost, in rounds of plain decoding: one that lost more than it gained begins no text.

    Plain decoding earns it a hundredth of its time, for another try: rounds of all requests count, and of all lives.
    """

    def __init__(self) -> None:
        self.balance = _START

    def record_gain(self, rounds: float = _SHARE) -> None:
        """So much was gained, or lost if it is negative."""
        self.balance = min(max(self.balance + rounds, _LEAST), _MOST)

    def settle(self, reading: float, gained: float) -> None:
        """A draft was tested. Reading is a risk; what drafts lose teaches, and takes no more than was gained."""
        self.record_gain(max(gained, -max(self.balance, 0.0)) - reading)

    def can_afford(self, rounds: float = 0.0) -> bool:
        """Whether it may try something that loses so much at most."""
        return self.balance >= min(rounds, _MOST) and rounds <= -_LEAST


class StageMemory:
    """What is remembered of one drafter for one request."""

    def __init__(self, drafter: DrafterMemory, now: int) -> None:
        self.drafter = drafter
        self.due, self.is_probing, self.passed = now, False, False  # when it is tried again, and whether it just was
        self.acceptance, self.sure = RequestAcceptance(drafter.shared), Confidence(drafter.sure)
        self.slots: Sequence[int] = ()  # of the tokens that it may draft, or has drafted, in this round
        self.price = (0.0, 0.0)  # seconds of catching up for this round's draft, and of each of its tokens
        self.read = 0  # tokens of the request that a drafter with a separate cache has read
        # A copy's first token that was not tested, and its place: whether it would have passed is seen without a test.
        self.shadow: tuple[int, int] | None = None
        self.looked: Proposal | None = None  # with all branches that there were to choose from in this round
        self.copied: tuple[int, Sequence[float]] = (-1, ())  # the last copy's round and chances, for a trace

    def record_probe(self, now: int, lost: float) -> None:
        """It tries a token, which loses so many rounds if it fails."""
        self.is_probing, self.due = True, now + _WAIT
        self.drafter.account.record_gain(-lost)

    def record_test(self, now: int, *, passed: bool) -> None:
        """Its draft was tested. One that does not pay is tried again later, at once if it was a probe that passed."""
        self.passed, self.is_probing = self.is_probing and passed, False
        self.due = now + (1 if self.passed else _WAIT)
