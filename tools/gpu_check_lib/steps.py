"""Single steps of an executor: timed, or compared with another's."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specexport_runtime.executors.base import Executor, Float32Array, Want
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork, step_shape

Texts = Sequence[Sequence[int]]


class StepTime(NamedTuple):
    """Median milliseconds of a step: in all, inside the engine, and the first step's."""

    total_ms: float
    engine_ms: float
    first_ms: float


def random_tokens(vocab: int, rows: int, count: int, seed: int = 3) -> list[list[int]]:
    """Token ids, [rows][count]."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, vocab, (rows, count)).tolist()
    return drawn


def fill(runner: ModelRunner, texts: Texts) -> None:
    """Feed and commit a text to each row, from row 0 on."""
    for row, tokens in enumerate(texts):
        runner.prefill(row, list(tokens))


def time_step(
    runner: ModelRunner, rows: int, new_tokens: int, *, repeats: int, seconds: float, warm_up: int = 5
) -> StepTime:
    """Time a step of ``new_tokens`` tokens on each of the first ``rows`` rows, which only token ids come back from.

    The entries it writes are not committed, so each repetition is the same step; the rows hold their past already.
    After ``warm_up`` steps, one of which may record a graph, it is repeated up to ``repeats`` times: until ``seconds``
    are over, but three times at least.
    """
    executor = runner.executor
    work = [RowWork(tokens, new_tokens) for tokens in random_tokens(executor.vocab_size, rows, new_tokens)]
    executor.capture([step_shape(0, work)])
    begin = time.perf_counter()
    runner.step(0, work, "token_ids")
    first = time.perf_counter() - begin
    for _ in range(warm_up):
        runner.step(0, work, "token_ids")
    totals: list[float] = []
    engines: list[float] = []
    while len(totals) < repeats and (len(totals) < 3 or time.perf_counter() - begin < seconds):
        engine, start = executor.engine_seconds, time.perf_counter()
        runner.step(0, work, "token_ids")
        totals.append(time.perf_counter() - start)
        engines.append(executor.engine_seconds - engine)
    return StepTime(1e3 * float(np.median(totals)), 1e3 * float(np.median(engines)), 1e3 * first)


class Comparison(NamedTuple):
    """Largest difference of two executors' logits in one step."""

    what: str
    largest: float  # largest absolute difference; NaN if either has one
    scale: float  # largest magnitude of the reference's logits
    same_best: int  # rows of logits whose best token is the same
    rows: int  # rows of logits


# (tokens of each row, tokens of each that are kept): a prefill, then ragged verify steps of four rows, one of them idle
Script = Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
SCRIPT: Script = (
    ("prefill 17, 5, 40, 1", (17, 5, 40, 1), (17, 5, 40, 1)),
    ("verify 5, 1, 3, 5", (5, 1, 3, 5), (2, 1, 3, 5)),
    ("verify 1, 5, 0, 4", (1, 5, 0, 4), (1, 3, 0, 1)),
    ("verify 5, 5, 5, 5", (5, 5, 5, 5), (5, 1, 4, 2)),
    ("decode 1, 1, 1, 1", (1, 1, 1, 1), (1, 1, 1, 1)),
)


def compare_steps(reference: Executor, other: Executor, script: Script = SCRIPT) -> list[Comparison]:
    """Run the same script of prefill and ragged verify steps on both, and compare every logit."""
    runners = [ModelRunner(reference), ModelRunner(other)]
    random = np.random.default_rng(11)
    found = []
    for what, counts, kept in script:
        # Few rows of logits a prompt, as engines with profiles have few; every row of a verify step.
        wanted = [min(count, 5) for count in counts]
        tokens = [random.integers(0, reference.vocab_size, count).tolist() for count in counts]
        work = [
            RowWork(ids, rows) if ids else IDLE for ids, rows in zip(tokens, wanted, strict=True)
        ]  # fmt: skip
        logits = [_step(runner, work, kept, "logits").astype(np.float32) for runner in runners]
        found.append(compare_logits(what, *logits))
    return found


def compare_logits(what: str, reference: Float32Array, other: Float32Array) -> Comparison:
    """The comparison of two arrays of logits [R, V]."""
    difference = np.abs(other - reference).max()  # NaN stays NaN
    same = int((reference.argmax(axis=1) == other.argmax(axis=1)).sum())
    return Comparison(what, float(difference), float(np.abs(reference).max()), same, len(reference))


def _step(runner: ModelRunner, work: Sequence[RowWork], kept: Sequence[int], want: Want) -> Float32Array:
    output = np.array(runner.step(0, work, want))
    for row, count in enumerate(kept):
        runner.kv.commit(row, runner.kv.kv_len(row) + count)
    return output
