"""Measures what a step of an engine costs: a few steps on empty cache rows, which are left empty.

Steps are those that decoding makes. Their tokens are different and from all over the vocabulary, so that a router of
experts sends them to as many as it would a text's. Rows with a state have drafts of the step before pending.
"""

import math
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from specexport_runtime.costs.step_cost import KvPair, RowCurve, StepCost, StepSize, clean_times, fit_kv_seconds
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor, as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork

DEFAULT_BUDGET_S = 1.5
_LEAST_REPEATS = 3  # the first step of a shape is slow, and two more tell how noisy they are
MIN_SECONDS = 1e-9
MAX_NOISE = 0.3
"""Above it, timings are too noisy to keep: the machine is busy."""
CONTEXTS = (16, 192)
"""Cache entries of a row in a short and a long past."""
_GOLDEN = 0.618  # of the vocabulary lies between one synthetic token and the next: no two that follow are alike


class _Point(NamedTuple):
    num_rows: int
    width: int
    context: int


class _Drafts(NamedTuple):
    """Drafts of one row around a step, of a model that keeps a state.

    Attributes:
        pending: wait beside the state when the step begins; they are among the row's entries.
        after: of the last tokens behind the step, how many are drafts.
    """

    pending: int
    after: int


def measure_step_cost(
    runner: ModelRunner,
    *,
    max_rows: int,
    max_tokens: int,
    contexts: tuple[int, int] = CONTEXTS,
    repeats: int = 20,
    all_logits: bool = True,
    lookahead: int = 1,
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
        lookahead: tokens of a draft (K), which a model that drafts keeps beside its state meanwhile.
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
                    drafts = _drafts_around(point.width, all_logits, lookahead)
                    samples.setdefault(point, []).append(_time_step(runner, point, drafts, all_logits, clock))
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


def _drafts_around(width: int, verifies: bool, lookahead: int) -> _Drafts:
    """What the steps of a round find beside a row's state, and leave there, on average.

    Half of a verification's drafts were accepted, and enter the state in the next one. A draft grows by a token a step,
    and each step goes through what was drafted before.
    """
    if verifies:
        return _Drafts(width // 2, width - 1)
    half = (lookahead - 1) // 2
    return _Drafts(half, half + 1 if width == 1 and lookahead > 1 else 0)


def _synthetic_tokens(executor: Executor, first: int, count: int) -> list[int]:
    """Tokens ``first`` to ``first + count`` of an endless text in which each id comes up equally often."""
    size = executor.vocab_size
    stride = max(1, round(_GOLDEN * size))
    while math.gcd(stride, size) > 1:
        stride += 1
    return [i * stride % size for i in range(first, first + count)]


def _tokens_of_row(executor: Executor, row: int, width: int) -> list[int]:
    """What a row is fed: other tokens than the other rows; of Medusa heads, their numbers."""
    head = as_head(executor)
    if head is not None and head.num_draft_heads and not head.reads_draft:
        return [min(i, head.num_draft_heads - 1) for i in range(width)]
    return _synthetic_tokens(executor, row * width, width)


def _fill_rows(runner: ModelRunner, num_rows: int, length: int) -> None:
    """Give each row a past of ``length`` entries: one row is prefilled, the others are copies of it."""
    runner.prefill(0, _tokens_of_row(runner.executor, 0, length))
    for row in range(1, num_rows):
        runner.executor.move_row(0, row, runner.kv.entries(0))
        runner.kv.assume(row, length)


def _time_step(
    runner: ModelRunner, point: _Point, drafts: _Drafts, all_logits: bool, clock: Callable[[], float]
) -> float:
    work = []
    for row in range(point.num_rows):
        runner.kv.assume(row, point.context, min(drafts.pending, point.context))
        tokens = _tokens_of_row(runner.executor, row, point.width)
        work.append(RowWork(tokens, point.width if all_logits else 1, drafts=drafts.after))
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
