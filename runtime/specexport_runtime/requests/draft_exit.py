"""Ending a draft that is no longer sure of itself: adaptive draft exit.

Zhang et al. 2024, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", section
3.4 (ASD drafts with it too). A draft ends when the draft's top probability falls under a threshold gamma, and gamma
moves so that a wanted share of draft tokens is accepted.
"""

import math
from dataclasses import dataclass, fields
from typing import Protocol

from specexport_runtime.errors import InvalidRequestError


@dataclass(frozen=True)
class DraftExitParams:
    """How the threshold starts and moves, as in the paper's public code; InvalidRequestError out of range."""

    gamma: float = 0.8  # of the first round, in [0, 1]: 0 never ends a draft, 1 ends every draft after one token
    target_acceptance: float = 0.9  # wanted acceptance rate, in (0, 1]: below it gamma rises, above it gamma falls
    epsilon: float = 0.01  # step of gamma, in [0, 1]; 0 leaves it where it is
    beta1: float = 0.5  # weight of the past in the measured acceptance rate, in [0, 1)
    beta2: float = 0.9  # weight of the past in gamma, in [0, 1)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = f"give a number in {_RANGES[field.name]}."
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidRequestError(f"{field.name} is {value!r}, which is not a number.", hint=wanted)
            if not _in_range(float(value), _RANGES[field.name]):
                raise InvalidRequestError(f"{field.name} is {value:g}.", hint=wanted)
            object.__setattr__(self, field.name, float(value))


class EndsDraft(Protocol):
    """What may end a draft before its length."""

    def should_end(self, top_probability: float, /) -> bool:
        """Whether the draft ends with the token just drafted, to whose step the draft gave this top probability."""
        ...


class DraftExit:
    """The threshold of one sequence.

    Acceptance is accepted over *tested* tokens (the paper: *drafted*): nothing is known of those after a rejected one.

    :meth:`should_end` asks for the draft's *top* probability, which does not depend on the token drawn, and the token
    whose step fell under gamma is kept and tested: else sampled text would leave the target's distribution.
    """

    def __init__(self, params: DraftExitParams | None = None) -> None:
        self.params = params or DraftExitParams()
        self.gamma = self.params.gamma
        # Exponential average of the measured rate; at first the wanted one, as nothing speaks against it yet.
        self.acceptance = self.params.target_acceptance

    def should_end(self, top_probability: float) -> bool:
        """Whether the draft ends with the token just drafted; the top probability is of that step, before any draw."""
        return top_probability < self.gamma

    def observe(self, accepted: int, rejected: bool) -> None:
        """Learn from the tests of one round, ``accepted`` of which passed; ``rejected``: one failed and ended them."""
        tests = accepted + rejected
        if not tests:
            return
        params = self.params
        self.acceptance = params.beta1 * self.acceptance + (1 - params.beta1) * accepted / tests
        step = params.epsilon if self.acceptance <= params.target_acceptance else -params.epsilon
        moved = params.beta2 * self.gamma + (1 - params.beta2) * (self.gamma + step)
        self.gamma = min(max(moved, 0.0), 1.0)


_RANGES = {
    "gamma": "[0, 1]",
    "target_acceptance": "(0, 1]",
    "epsilon": "[0, 1]",
    "beta1": "[0, 1)",
    "beta2": "[0, 1)",
}


def _in_range(value: float, interval: str) -> bool:
    low = value > 0 if interval[0] == "(" else value >= 0
    high = value < 1 if interval[-1] == ")" else value <= 1
    return math.isfinite(value) and low and high
