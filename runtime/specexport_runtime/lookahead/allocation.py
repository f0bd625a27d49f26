"""How many draft tokens each sequence of a step gets, so that the step gives most expected tokens per second."""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Seconds of a step by what is drafted."""

    target: Seq[float]  # of the target's step, by draft tokens of all sequences together, from 0
    draft: Seq[float] | None  # of one draft step, by rows that draft in it, from 0; None if drafting costs nothing
    rows: Seq[int]  # that draft anyway, by depth (0 is the first token); as many as the largest lookahead


def allocate(
    gains: Seq[Seq[float]], entries: Seq[float], expected: float, times: StepTimes, margin: float = 0.0
) -> tuple[list[int], float]:
    """Maximize (expected + sum of gains) / (target's step + draft steps) over the number of tokens of each sequence.

    Tokens are taken in the order of their gain, and every number of them is tried. That order alone would leave out
    what it costs to go one depth deeper, one more draft step whoever takes part: so every largest depth is tried, the
    next as long as one of the last two was better. What is dear to begin with must not stand in the way of the others:
    they are tried with it and without.

    ``gains`` are the chances that a draft is accepted up to its first, second, … token, falling, and as many as it may
    have; ``entries`` what the first token of each costs besides. Without drafts the step gives ``expected``; drafting
    must promise more by the share ``margin``, since times are known no better. Draft tokens of each come back, and the
    tokens per second.
    """
    base = 0.0 if times.draft is None else sum([times.draft[rows] for rows in times.rows])
    best, counts = (1.0 + margin) * expected / (times.target[0] + base), [0] * len(gains)
    items = sorted([(-gain, depth, i) for i, each in enumerate(gains) for depth, gain in enumerate(each)])
    deepest = max((len(each) for each in gains), default=0)
    least = deepest if times.draft is None or len(gains) == 1 else 1  # tokens of one sequence come in their order
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
    items: Seq[tuple[float, int, int]], entries: Seq[float], expected: float, seconds: float, times: StepTimes
) -> tuple[float, int]:
    """Most tokens per second of any number of the first ``items`` (negative gain, depth, sequence), and that number."""
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
