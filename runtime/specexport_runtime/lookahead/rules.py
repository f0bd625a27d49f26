"""The rules by which a round's drafts get their lengths: each looks at a stage, and changes what is allowed in it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.lookahead.round import DraftCandidate, Stage

# Judged by test_replay.py's modelled seconds: the mean and the worst, of all its cases or a part.
_MARGIN = 0.02
"""Drafting must promise so much more than plain decoding: costs are known no better than that.

Replayed: without it 1.4 % slower at worst, with 0.1 8 %.
"""
_WORTH_READING = 0.1
"""The same before a drafter reads what it may read in vain: while a batch fills, or while it has no record.

Replayed: 0.02 is 0.2 % slower, and 7 % at worst.
"""
_TRIED_LOOKAHEAD, _HOPED = 2, 0.9
"""A drafter that is not known yet drafts at least so many tokens, if it would pay with so good an acceptance.

Replayed: without the rule 1.4 % slower, and 28 % at worst; 0.8 and 0.95 are within 2 % in each case.
"""
_BEST = 0.95
"""Acceptance of a draft that is as good as drafts are. Replayed: where none need be so good, 2 % slower at worst."""

Rule = Callable[[Stage], None]


def exclude_unread_prompts(stage: Stage) -> None:
    """Nobody drafts whose prompt has just ended: its first token is not there yet."""
    for ask in stage.asks:
        ask.is_out |= not ask.req.num_generated or not ask.most


def exclude_unprofitable_reading(stage: Stage) -> None:
    """Who has yet to read a request looks ahead to the full step, and back at what such drafts gained so far.

    What pays for a few rows may not pay for many, and what paid for other texts may not pay for those of today.
    """
    full = stage.round.load.when_full()
    least = (1 + _WORTH_READING) * stage.round.plain_rate(full)
    for ask in stage.candidates if stage.drafter.traits.has_own_cache else ():
        if not ask.memory.read:
            pays = full is None or any(rate > least for _, rate in stage.rates(ask, full))
            ask.is_out = not pays or not ask.memory.drafter.account.can_afford()


def maximize_tokens_per_second(stage: Stage) -> None:
    """The lengths that give the step most expected tokens a second, or none."""
    asks, now = stage.candidates, stage.round
    for ask in asks:
        ask.entry = stage.price(ask)
    draft = None if stage.drafter.cost is None else stage.draft_step_seconds(len(stage.requests))
    target = now.verify(sum([ask.most for ask in asks]))
    counts, rate = allocate(
        [ask.gains for ask in asks],
        [ask.entry for ask in asks],
        now.expected,
        StepTimes(target, draft, stage.fixed),
        _MARGIN,
    )
    drafting, total = sum([count > 0 for count in counts]), sum(counts)
    for ask, count in zip(asks, counts, strict=True):
        ask.count = count
        if draft is not None and count:
            ask.goes_on = drafting == 1 and not any(stage.fixed)  # alone: each step is for it, and so is its price
            worth = rate / (1.0 - ask.memory.acceptance.failure_rates[0])
            step, each = draft[drafting] - draft[drafting - 1], (target[total] - target[0]) / total
            tokens = [target[k + 1] - target[k] if ask.goes_on else each for k in range(ask.most)]
            ask.least = [worth * (step + token) for token in tokens]


def try_unknown_drafters(stage: Stage) -> None:
    """A drafter whose drafts or steps have hardly been seen, and that would pay if it is good, drafts a little."""
    full = stage.round.load.when_full()
    least = (1 + _WORTH_READING) * stage.round.plain_rate(full)
    is_new = stage.round.learned.is_unknown(stage.name)
    for ask in stage.candidates:
        if is_new or ask.memory.drafter.is_unknown:
            hoped = [_HOPED**depth for depth in range(1, min(ask.most, _TRIED_LOOKAHEAD) + 1)]
            if any(rate > least for _, rate in stage.rates(ask, full, hoped)):
                ask.count = max(ask.count, len(hoped))


def shorten_to_learn(stage: Stage) -> None:
    """Where all steps have as many draft tokens, what one adds cannot be told: now and then there are fewer."""
    now = stage.round
    if now.learned.needs_shorter_draft(now.load.num_rows):
        now.is_shorter = True
        for ask in stage.candidates:
            ask.count //= 2


def allow_cheap_probes(stage: Stage) -> None:
    """Requests that draft nothing try one token, if it is time, and what earlier drafts gained or lost allows it."""
    asks, now = stage.candidates, stage.round
    due = [ask for ask in asks if not ask.count and ask.memory.due <= now.number]
    if not due:
        return
    target, draft = (
        now.verify(sum([ask.count for ask in asks]) + len(due)),
        stage.draft_step_seconds(len(stage.requests)),
    )
    for ask in due:
        taken = sum([each.count for each in asks])
        rows = (stage.fixed[0] if stage.fixed else 0) + sum([each.count > 0 for each in asks])
        cost, reading = target[taken + 1] - target[taken] + draft[rows + 1] - draft[rows], stage.catch_up(ask)
        lost = (cost + reading + stage.each_round) / now.plain
        can_afford = ask.memory.drafter.account.can_afford(lost) and (not reading or _could_pay(stage, ask))
        if can_afford or (ask.memory.passed and not reading):
            ask.count, ask.is_probe, now.has_probe = 1, True, True
            ask.memory.record_probe(now.number, lost)


def _could_pay(stage: Stage, ask: DraftCandidate) -> bool:
    """Whether drafts as good as they may be would be worth what has to be read, at the costs that sizes promise."""
    promised = replace(stage, round=replace(stage.round, learned=LearnedCosts()))
    best = replace(ask, gains=[_BEST**depth for depth in range(1, ask.most + 1)])
    return any(rate * stage.round.plain > 1 + _WORTH_READING for _, rate in promised.rates(best))


DRAFTED: tuple[Rule, ...] = (
    exclude_unread_prompts,
    exclude_unprofitable_reading,
    maximize_tokens_per_second,
    try_unknown_drafters,
    shorten_to_learn,
    allow_cheap_probes,
)
"""For drafters that take time, in order."""
COPIED: tuple[Rule, ...] = (maximize_tokens_per_second,)
"""For copies that are there already."""


class StepTimes(NamedTuple):
    """Seconds of a step by what is drafted."""

    target: Sequence[float]  # of the target's step, by draft tokens of all requests together, from 0
    draft: Sequence[float] | None  # of one draft step, by rows that draft in it, from 0; None if drafting costs nothing
    rows: Sequence[int]  # that draft anyway, by depth (0 is the first token); as many as the largest lookahead


def allocate(
    gains: Sequence[Sequence[float]], entries: Sequence[float], expected: float, times: StepTimes, margin: float = 0.0
) -> tuple[list[int], float]:
    """Maximize (expected + sum of gains) / (target's step + draft steps) over the number of tokens of each request.

    Tokens are taken in the order of their gain, for every largest depth while one of the last two was better: a depth
    more is a draft step more. What is dear to begin with is tried with and without.

    ``gains`` are falling chances that a draft is accepted up to each token; ``entries`` what a first token costs
    besides. Drafting must promise more than ``expected`` by the share ``margin``. Draft tokens and tokens per second
    come back.
    """
    base = 0.0 if times.draft is None else sum([times.draft[rows] for rows in times.rows])
    best, counts = (1.0 + margin) * expected / (times.target[0] + base), [0] * len(gains)
    items = sorted([(-gain, depth, i) for i, each in enumerate(gains) for depth, gain in enumerate(each)])
    deepest = max((len(each) for each in gains), default=0)
    least = deepest if times.draft is None or len(gains) == 1 else 1  # tokens of one request come in their order
    for entry in sorted(set(entries)):
        worse, affordable = 0, [item for item in items if entries[item[2]] <= entry]
        for most in range(least, deepest + 1):
            tried = affordable if most == deepest else [item for item in affordable if item[1] < most]
            goodput, count = _best_prefix(tried, entries, expected, base, times)
            worse = 0 if goodput > best else worse + 1
            if goodput > best:
                best, counts = goodput, [0] * len(gains)
                for _, _, i in tried[:count]:
                    counts[i] += 1
            elif worse == 2:
                break
    return counts, best


def _best_prefix(
    items: Sequence[tuple[float, int, int]], entries: Sequence[float], expected: float, seconds: float, times: StepTimes
) -> tuple[float, int]:
    """Most tokens per second of any number of the first ``items`` (negative gain, depth, request), and that number."""
    target, draft, active = times.target, times.draft, list(times.rows)
    best, count = 0.0, 0
    for taken, (gain, depth, i) in enumerate(items, 1):
        expected -= gain
        if draft is not None:
            rows = active[depth]
            active[depth] = rows + 1
            seconds += draft[rows + 1] - draft[rows]
        if not depth:
            seconds += entries[i]
        goodput = expected / (target[taken] + seconds)
        if goodput > best:
            best, count = goodput, taken
    return best, count
