"""What a trace adds up to: time saved, acceptance by position, and the K that would have been best."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.bench.acceptance import LookaheadVerdict, Position, count_positions, judge, step_seconds
from specexport_runtime.requests.records import RoundTrace

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.costs.learned import LearnedCosts
    from specexport_runtime.requests.layer_choice import LayerChoice


class DrafterSummary(NamedTuple):
    """How one way to go on, a drafter or plain decoding, fared in a trace."""

    drafter: str  # empty for plain decoding
    taken: int  # rounds that went this way
    promised: float | None  # mean tokens a second that it promised in these; None if it was weighed in none
    real: float | None  # tokens a second that these gave; None if there were none
    turned_down: int  # rounds in which it was weighed, and another way was taken
    declined: float | None  # mean tokens a second that it promised in those, at its best K; None if there were none
    # mean tokens a second that the ways that were taken promised in those; None if there were none
    instead: float | None


class Summary(NamedTuple):
    """A whole trace."""

    rounds: int  # verify rounds
    tokens: int  # that the rounds gave
    drafted: int  # draft tokens, those of branches included
    accepted: int  # draft tokens that were accepted
    branches: int  # of ``drafted``, tokens beside the chain
    accepted_branches: int  # of ``accepted``
    milliseconds: float  # of all rounds
    plain_milliseconds: float | None  # of plain decoding for the same tokens; None if that is not known
    ends: dict[str, int]  # why drafts ended, and how often
    reasons: dict[str, int]  # why K was what it was, and how often
    positions: dict[str, list[Position]]  # tests of each draft position, by drafter
    verdicts: list[LookaheadVerdict]  # one for each drafter that drafted; empty without cost curves
    ways: list[DrafterSummary]  # one for each drafter, or plain decoding, that was taken or weighed

    @property
    def saved_milliseconds(self) -> float | None:
        """Milliseconds saved against plain decoding; negative if time was lost."""
        return None if self.plain_milliseconds is None else self.plain_milliseconds - self.milliseconds

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            **self._asdict(),
            "saved_milliseconds": self.saved_milliseconds,
            "positions": {name: [list(each) for each in found] for name, found in self.positions.items()},
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
            "ways": [way._asdict() for way in self.ways],
        }


def compare_ways(trace: Sequence[RoundTrace]) -> list[DrafterSummary]:
    """What each drafter and plain decoding (rounds without a draft) promised in a trace, and what was given."""
    taken = [r.drafter if r.drafted else "" for r in trace]
    weighed = [each.drafter for r in trace for each in r.promised]
    ways = []
    for name in sorted(dict.fromkeys((*taken, *weighed)), key=lambda name: not name):  # plain decoding comes last
        own = [r for r, way in zip(trace, taken, strict=True) if way == name]
        others = [(each, r.taken) for r in trace for each in r.turned_down if each.drafter == name]
        ways.append(
            DrafterSummary(
                drafter=name,
                taken=len(own),
                promised=_mean([r.taken.tokens_per_second for r in own if r.taken is not None]),
                real=1000 * sum(len(r.emitted) for r in own) / sum(r.milliseconds for r in own) if own else None,
                turned_down=len(others),
                declined=_mean([each.tokens_per_second for each, _ in others]),
                instead=_mean([other.tokens_per_second for _, other in others if other is not None]),
            )
        )
    return ways


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def summarize(
    trace: Sequence[RoundTrace],
    *,
    curves: "CostCurves | None",  # what steps cost by size; None gives no verdict
    learned: "LearnedCosts | None" = None,  # corrects them by what rounds took; None takes them as they are
    longest: int,  # largest K to judge
    context: int,  # cache entries that a step reads, on average
    layers: "LayerChoice | None" = None,  # what the draft of ``self`` keeps; None takes the whole target for it
) -> Summary:
    """Add up the trace of one sequence that was decoded alone."""
    plain = [r.plain_milliseconds for r in trace]
    drafters = list(dict.fromkeys(r.drafter for r in trace if r.own[0]))
    positions = {name: count_positions(trace, name) for name in drafters}
    verdicts = [
        judge(name, found, longest, *step_seconds(curves, learned, name, context, layers))
        for name, found in positions.items()
        if curves is not None
    ]
    return Summary(
        rounds=len(trace),
        tokens=sum(len(r.emitted) for r in trace),
        drafted=sum(r.num_tested for r in trace),
        accepted=sum(r.accepted for r in trace),
        branches=sum(len(r.branches) for r in trace),
        accepted_branches=sum(r.accepted - r.on_chain for r in trace),
        milliseconds=sum(r.milliseconds for r in trace),
        plain_milliseconds=None if None in plain else sum(value for value in plain if value is not None),
        ends=dict(Counter(r.end for r in trace)),
        reasons=dict(Counter(r.allowed.reason for r in trace if r.allowed is not None)),
        positions=positions,
        verdicts=verdicts,
        ways=compare_ways(trace),
    )
