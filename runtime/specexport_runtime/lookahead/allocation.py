"""How many draft tokens each sequence of a step gets, so that the step gives most expected tokens per second."""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Seconds of a step by what is drafted.

    Attributes:
        target: of the target's step, by draft tokens of all sequences together, from 0.
        draft: of one draft step, by rows that draft in it, from 0 (where it is 0); None if drafting costs nothing.
        rows: rows that draft anyway, by depth (0 is the first draft token); as many as the largest lookahead.
    """

    target: Seq[float]
    draft: Seq[float] | None
    rows: Seq[int]


def allocate(
    gains: Seq[Seq[float]], entries: Seq[float], expected: float, times: StepTimes, margin: float = 0.0
) -> tuple[list[int], float]:
    """Maximize (expected + sum of gains) / (target's step + draft steps) over the number of tokens of each sequence.

    Tokens are taken in the order of their gain, and every number of them is tried. That order alone would leave out
    what it costs to go one depth deeper, one more draft step whoever takes part: so every largest depth is tried, the
    next as long as one of the last two was better.

    Args:
        gains: for each sequence the probabilities that its draft is accepted up to its first, second, … token;
            falling. Their number is the most it may draft.
        entries: seconds that the first token of each sequence costs besides.
        expected: tokens that the step gives without these drafts.
        times: of the step.
        margin: share by which drafting must promise more than not drafting. Times are measured, so what promises less
            than their error is worth nothing.

    Returns:
        draft tokens of each sequence, and the expected tokens per second.
    """
    base = _base(times)
    least = (1.0 + margin) * expected / (times.target[0] + base)
    if len(gains) == 1:
        return _allocate_one(gains[0], entries[0], expected, base, least, times)
    # What is dear to begin with must not stand in the way of the others: tried with it and without.
    tried = [
        _allocate_many(
            [each if entry <= most else () for each, entry in zip(gains, entries, strict=True)],
            entries,
            expected,
            base,
            least,
            times,
        )
        for most in (sorted(set(entries)) if any(entries) else (0.0,))
    ]
    return max(tried, key=lambda found: found[1])


def _allocate_many(
    gains: Seq[Seq[float]], entries: Seq[float], expected: float, base: float, best: float, times: StepTimes
) -> tuple[list[int], float]:
    """``base``: seconds of the drafts that are there anyway. ``best``: what must be beaten, else nothing is chosen."""
    items = sorted([(-gain, depth, i) for i, each in enumerate(gains) for depth, gain in enumerate(each)])
    deepest = max((len(each) for each in gains), default=0)
    chosen = items[:0]
    worse = 0
    for most in range(1 if times.draft is not None else deepest, deepest + 1):
        tried = items if most == deepest else [item for item in items if item[1] < most]
        goodput, count = _best_prefix(tried, entries, expected, base, times)
        if goodput > best:
            best, chosen, worse = goodput, tried[:count], 0
        else:
            worse += 1
            if worse == 2:
                break
    counts = [0] * len(gains)
    for _, _, i in chosen:
        counts[i] += 1
    return counts, best


def _base(times: StepTimes) -> float:
    return 0.0 if times.draft is None else sum([times.draft[rows] for rows in times.rows])


def _allocate_one(
    gains: Seq[float], entry: float, expected: float, base: float, best: float, times: StepTimes
) -> tuple[list[int], float]:
    """One sequence: every length is tried. ``base`` and ``best`` as in ``_allocate_many``."""
    target, draft, rows = times
    seconds, count = base + entry, 0
    for depth, gain in enumerate(gains):
        expected += gain
        if draft is not None:
            seconds += draft[rows[depth] + 1] - draft[rows[depth]]
        goodput = expected / (target[depth + 1] + seconds)
        if goodput > best:
            best, count = goodput, depth + 1
    return [count], best


def _best_prefix(
    items: Seq[tuple[float, int, int]], entries: Seq[float], expected: float, seconds: float, times: StepTimes
) -> tuple[float, int]:
    """Which number of the first ``items`` (negative gain, depth, sequence) is best; its tokens per second."""
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
