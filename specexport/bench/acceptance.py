"""Acceptance by draft position, and what that makes of each K at known costs of steps."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.requests.records import RoundTrace

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.costs.learned import LearnedCosts
    from specexport_runtime.requests.layer_choice import LayerChoice

Seconds = Callable[[int], float]


class Position(NamedTuple):
    """Tests of one draft position."""

    tested: int  # drafts that had a token there, all before it being accepted
    accepted: int  # tested tokens that were accepted

    @property
    def rate(self) -> float:
        """Share that was accepted."""
        return self.accepted / self.tested


class LookaheadVerdict(NamedTuple):
    """What the costs of steps say about K for one drafter, given the acceptance that was measured."""

    drafter: str
    best: int  # K with the most expected tokens per second; 0 is plain decoding
    speedups: tuple[float, ...]  # by K from 0: expected tokens per second over those of plain decoding


def count_positions(trace: Sequence[RoundTrace], drafter: str) -> list[Position]:
    """Tests of each position of the chains of one drafter, from the first on, as far as any was tested."""
    drafts = [r.own for r in trace if r.drafter == drafter and r.drafted]
    found = []
    for index in range(max((length for length, _ in drafts), default=0)):
        tested = sum(length > index and accepted >= index for length, accepted in drafts)
        if not tested:
            break
        found.append(Position(tested, sum(length > index and accepted > index for length, accepted in drafts)))
    return found


def expected_tokens(positions: Sequence[Position], lookahead: int) -> float:
    """Expected tokens of a round: 1 + a₁ + a₁a₂ and so on; untested positions are as good as the last tested one."""
    total = reach = 1.0
    for index in range(lookahead):
        reach *= positions[min(index, len(positions) - 1)].rate
        total += reach
    return total


def judge(
    drafter: str, positions: Sequence[Position], longest: int, verify: Seconds, draft: Seconds
) -> LookaheadVerdict:
    """Compare every K up to ``longest`` by expected tokens per second; at least one of ``positions`` is needed."""
    plain = 1 / verify(0)
    goodput = [expected_tokens(positions, k) / (verify(k) + draft(k)) / plain for k in range(longest + 1)]
    return LookaheadVerdict(drafter, max(range(longest + 1), key=lambda k: (goodput[k], -k)), tuple(goodput))


def step_seconds(
    curves: "CostCurves",
    learned: "LearnedCosts | None",  # corrects the curves by what rounds took; None takes them as they are
    drafter: str,
    context: int,  # cache entries that a step reads, on average
    layers: "LayerChoice | None",  # what the draft of ``self`` keeps; None takes the whole target for it
) -> tuple[Seconds, Seconds]:
    """Seconds of the target's step with K draft tokens, and of drafting these, for one sequence decoded alone."""
    extra, ratio = (1.0, 1.0) if learned is None else (learned.extra_ratio(1), learned.draft_ratio(drafter, 1))
    if drafter in KINDS and KINDS[drafter].traits.is_free:
        step = 0.0
    elif drafter in curves.drafters:
        step = curves.drafters[drafter].seconds(1, 1, context)
    elif layers is None:
        step = curves.target.seconds(1, 1, context)
    else:
        step = curves.self_draft_seconds(layers.mixers.count(False), layers.mlps_off, 1, 1, context)
    return lambda k: curves.target.seconds(1 + extra * k, 1, context), lambda k: k * ratio * step
