"""Measures what a step of an engine costs: a few steps on empty cache rows, which are left empty."""

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from specexport_runtime.costs.step_cost import KvPair, RowCurve, StepCost, StepSize, clean_times, fit_kv_seconds
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner, RowWork

DEFAULT_BUDGET_S = 1.5
_LEAST_REPEATS = 3  # the first step of a shape is slow, and two more tell how noisy they are
MIN_SECONDS = 1e-9
MAX_NOISE = 0.3
"""Above it, timings are too noisy to keep: the machine is busy."""
CONTEXTS = (16, 192)
"""Cache entries of a row in a short and a long past."""
_TOKENS = 251  # synthetic prompts repeat after so many ids


class _Point(NamedTuple):
    num_rows: int
    width: int
    context: int


def measure_step_cost(
    runner: ModelRunner,
    *,
    max_rows: int,
    max_tokens: int,
    contexts: tuple[int, int] = CONTEXTS,
    repeats: int = 20,
    all_logits: bool = True,
    budget_s: float = DEFAULT_BUDGET_S,
    filled: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """Measure steps at a few widths and row counts; the fastest of the repeats counts.

    Every repeat times all points once, so that a slow moment of the machine hits one repeat of many points and not
    all repeats of one. The rows get a synthetic past first; they are empty again afterwards.

    Args:
        runner: the model. Its first ``max_rows`` rows must be empty.
        max_rows: most rows of a step (B).
        max_tokens: most new tokens of a row: K+1 for a target.
        contexts: cache entries of each row in a short and a long past; less where a row is too small.
        repeats: how often each point is measured, at most; three times if the budget allows.
        all_logits: every token needs logits, as in verification; False: the last of each row, as in drafting.
        budget_s: after so many seconds no repeat begins, unless the timings are noisy; after twice as many (a slow or
            busy machine) only one token and the most tokens of one row and of all rows are measured, three times.
        filled: called when the rows have their past, before the first step that is timed.
        clock: seconds; tests bring their own.

    Raises:
        SpecexportError: a row is in use, or cannot hold a step.
    """
    busy = [row for row in range(max_rows) if runner.kv.entries(row)]
    if busy:
        raise SpecexportError(f"costs are measured on empty cache rows; row {busy[0]} is in use.")
    room = runner.kv.capacity - max_tokens
    short, long = (max(1, min(context, room)) for context in contexts)
    most = runner.executor.max_num_tokens
    points = [p for p in _points(max_rows, max_tokens, short, long) if most is None or p.num_rows * p.width <= most]
    corners = {p for p in points if p.context == short and p.num_rows in (1, max_rows) and p.width in (1, max_tokens)}
    samples: dict[_Point, list[float]] = {}
    try:
        _fill_rows(runner, max_rows, long)
        filled()
        start = clock()
        for repeat in count():
            spent = clock() - start
            enough = repeat >= repeats or spent > (budget_s if _noise(samples) <= MAX_NOISE else 2 * budget_s)
            if repeat >= _LEAST_REPEATS and enough:
                break
            for point in points:
                if clock() - start <= 2 * budget_s or (repeat < _LEAST_REPEATS and point in corners):
                    samples.setdefault(point, []).append(_time_step(runner, point, all_logits, clock))
    finally:
        for row in range(max_rows):
            runner.release_row(row)
            runner.give_back(row, 0)
    return _fit({point: min(seconds) for point, seconds in samples.items()}, short, long, _noise(samples))


def _noise(samples: Mapping[_Point, list[float]]) -> float:
    """How much slower the second fastest repeat was than the fastest: exceeded by a quarter of the points."""
    pairs = (sorted(seconds)[:2] for seconds in samples.values() if len(seconds) > 1)
    excess = sorted(second / max(first, MIN_SECONDS) - 1 for first, second in pairs)
    return excess[3 * len(excess) // 4] if excess else 0.0


def widths_up_to(most: int) -> list[int]:
    """Tokens a row to measure: 1, 2, 3, 5, 9, 17 and so on, and the most."""
    widths = {1, most}
    step = 1
    while step < most:
        widths.add(step + 1)
        step *= 2
    return sorted(widths)


def row_counts_up_to(most: int) -> list[int]:
    """Row counts to measure: 1, the most, and their geometric mean: costs bend where there are few rows."""
    return sorted({1, round(most**0.5), most})


def _points(max_rows: int, max_tokens: int, short: int, long: int) -> list[_Point]:
    """One row at every width; more rows at three; and a long past at the ends."""
    widths = widths_up_to(max_tokens)
    few = sorted({1, min(3, max_tokens), max_tokens})
    points = [_Point(1, width, short) for width in widths]
    points += [_Point(rows, width, short) for rows in row_counts_up_to(max_rows) if rows > 1 for width in few]
    if long > short:
        ends = {(1, 1), (1, max_tokens), (max_rows, 1)}
        points += [_Point(rows, width, long) for rows, width in sorted(ends)]
    return points


def _fill_rows(runner: ModelRunner, num_rows: int, length: int) -> None:
    """Give each row a past of ``length`` entries: one row is prefilled, the others are copies of it."""
    period = min(_TOKENS, runner.executor.vocab_size)
    runner.prefill(0, [i % period for i in range(length)])
    for row in range(1, num_rows):
        runner.executor.move_row(0, row, runner.kv.entries(0))
        _set_past(runner, row, length)


def _set_past(runner: ModelRunner, row: int, length: int) -> None:
    """Make ``length`` the committed length of a row whose cache has been filled at least so far."""
    runner.kv.assume(row, length)


def _time_step(runner: ModelRunner, point: _Point, all_logits: bool, clock: Callable[[], float]) -> float:
    for row in range(point.num_rows):
        _set_past(runner, row, point.context)
    period = min(_TOKENS, runner.executor.vocab_size)
    work = []
    for row in range(point.num_rows):
        # Other tokens in each row: with the same ones, a router would choose the same experts for all rows.
        first = row * point.width
        tokens = [i % period for i in range(first, first + point.width)]
        work.append(RowWork(tokens, point.width if all_logits else 1, drafts=point.width - 1))
    start = clock()
    runner.step(0, work, "token_ids")
    return clock() - start


def _fit(fastest: Mapping[_Point, float], short: int, long: int, noise: float) -> StepCost:
    near, far = (
        clean_times({StepSize(p.num_rows, p.width): s for p, s in fastest.items() if p.context == context})
        for context in (short, long)
    )
    pairs = [
        KvPair(size.width, size.num_rows * (long - short), seconds - near[size])
        for size, seconds in far.items()
        if long > short and size in near
    ]
    each, token = fit_kv_seconds(pairs)
    bases = {
        size: max(s - size.num_rows * short * (each + token * size.width), MIN_SECONDS) for size, s in near.items()
    }
    curves = []
    for rows in sorted({size.num_rows for size in bases}):
        widths = sorted(size.width for size in bases if size.num_rows == rows)
        seconds = [bases[StepSize(rows, width)] for width in widths]
        # What was subtracted grows with the width.
        curves.append(RowCurve(rows, tuple(widths), tuple(min(seconds[i:]) for i in range(len(seconds)))))
    return StepCost(tuple(curves), each, token, noise)
