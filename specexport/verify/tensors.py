"""Part (a): an engine's logits against eager transformers, at every step shape that a decoding round can have.

::

    prefill   one row, the whole sequence, in chunks
    width w   one row, w new tokens on a past, for w = 1 … K+1, each after a rollback of the one before
    ragged    several rows of unequal pasts and unequal new tokens (some none), with rejected tokens left in the cache

The references come from the caller, so this module imports neither torch nor transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexport.rounding import LogitTolerance, logit_tolerance
from specexport.verify.neighbours import LEAST_TOKENS
from specexport.verify.tolerance import logit_scale
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork

LONGEST_SEQUENCE = 600
"""Most tokens of a sequence of :func:`make_sequences`."""

_MAX_RAGGED_STEPS = 12
_NUM_ROWS = 4
_REFERENCE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TensorCase:
    """One kind of step."""

    name: str  # ``"prefill"``, ``"width 3"``, ``"ragged"``
    rows: int  # logit rows compared
    max_abs: float  # largest absolute difference of a logit
    max_relative: float  # largest difference over the logit scale of its sequence
    max_rms: float  # largest root mean square of a row's differences, over the same
    argmax_agreement: float  # share of rows with the same most likely token
    passed: bool  # every difference is within the tolerance


@dataclass(frozen=True)
class TensorResult:
    """One engine against eager transformers."""

    role: str  # ``"target"`` or ``"draft"``
    passed: bool
    cases: tuple[TensorCase, ...]  # one for each kind of step
    tolerance: float  # largest difference allowed, relative to the logit scale
    rms_tolerance: float  # largest root mean square of a row's differences allowed, relative to the logit scale
    compared: str  # in words

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of all cases (NaN if any is)."""
        return float(np.max([case.max_abs for case in self.cases]))

    @property
    def max_relative(self) -> float:
        """Largest relative difference of all cases (NaN if any is)."""
        return float(np.max([case.max_relative for case in self.cases]))


def make_sequences(
    texts: Sequence[Sequence[int]], vocab_size: int, *, lookahead: int, max_model_len: int, num_rows: int = _NUM_ROWS
) -> list[list[int]]:
    """Token sequences for the check: real ``texts``, and one of random ids so that rare embeddings are seen too.

    Ids from ``vocab_size`` on are left out. The first of ``num_rows`` has several hundred entries where V allows it.
    """
    pool = [token for text in texts for token in text if token < vocab_size] or [0]
    random = np.random.default_rng(7).integers(0, vocab_size, max_model_len).tolist()
    short = min(4 * (lookahead + 1), max_model_len)
    # References are [len, V] float32; a vocabulary of 262,144 leaves room for fewer tokens.
    budget = _REFERENCE_BYTES // (4 * vocab_size)
    long = max(short, min(LONGEST_SEQUENCE, max_model_len, budget - (num_rows - 1) * short))
    sequences = []
    for row in range(num_rows):
        length = long if row == 0 else max(LEAST_TOKENS, short - 3 * row)
        source = random if row == 1 else _cycle(pool, 17 * row, length)
        sequences.append(list(source[:length]))
    return sequences


def _cycle(pool: Sequence[int], start: int, length: int) -> list[int]:
    return [pool[(start + i) % len(pool)] for i in range(length)]


class _Comparison:
    """Collects rows of logits and their references under the names of cases."""

    def __init__(self, tolerance: LogitTolerance, references: Sequence[Float32Array]) -> None:
        self._tolerance = tolerance
        self._references = references
        self._scales = [logit_scale(reference) for reference in references]
        self._rows: dict[str, list[tuple[float, float, float, bool]]] = {}

    def add(self, case: str, sequence: int, start: int, logits: Float32Array) -> None:
        """Compare ``logits`` [n, V] with the reference of positions start … start+n-1 of a sequence."""
        reference = self._references[sequence][start : start + len(logits)]
        with np.errstate(invalid="ignore"):  # infinities that should not be there become NaN, which fails
            differences = np.abs(logits - reference)
            errors, rms = differences.max(axis=1), np.sqrt(np.square(differences).mean(axis=1))
        same = logits.argmax(axis=1) == reference.argmax(axis=1)
        scale = self._scales[sequence]
        self._rows.setdefault(case, []).extend(
            (float(error), float(error) / scale, float(mean) / scale, bool(agrees))
            for error, mean, agrees in zip(errors, rms, same, strict=True)
        )

    def cases(self) -> tuple[TensorCase, ...]:
        found = []
        for name, rows in self._rows.items():
            absolute, relative, rms, same = (np.array(column) for column in zip(*rows, strict=True))
            # NaN must fail: it is not at most the tolerance.
            passed = bool(relative.max() <= self._tolerance.largest and rms.max() <= self._tolerance.rms)
            largest, furthest, typical = (float(column.max()) for column in (absolute, relative, rms))
            found.append(TensorCase(name, len(rows), largest, furthest, typical, float(same.mean()), passed))
        return tuple(found)


def check_tensors(
    role: str,  # ``"target"`` or ``"draft"``, for the report
    executor: Executor,
    sequences: Sequence[
        Sequence[int]
    ],  # token ids, one for each cache row used; none longer than a cache row less K+1 entries
    references: Sequence[Float32Array],  # logits [len, V] of each sequence
    *,
    lookahead: int,  # K; widths 1 … K+1 are checked
    dtype: str = "float32",  # of the engine; decides the tolerance together with ``num_layers``
    num_layers: int = 1,  # L, attention layers of the model
) -> TensorResult:
    """Compare an engine, which nothing else may use, with reference logits; IncompatibleError for other dtypes."""
    tolerance = logit_tolerance(dtype, num_layers)
    comparison = _Comparison(tolerance, references)
    _check_prefill(executor, sequences[0], lookahead, comparison)
    _check_widths(executor, sequences[0], lookahead, comparison)
    if len(sequences) > 1:
        _check_ragged(executor, sequences, lookahead, comparison)
    cases = comparison.cases()
    compared = (
        f"all logits of {sum(case.rows for case in cases)} rows: prefill of {len(sequences[0])} tokens, steps of 1 to "
        f"{lookahead + 1} tokens, ragged steps of {len(sequences)} sequences, each after rollbacks"
    )
    return TensorResult(role, all(case.passed for case in cases), cases, *tolerance, compared)


def _check_prefill(executor: Executor, sequence: Sequence[int], lookahead: int, comparison: _Comparison) -> None:
    runner = ModelRunner(executor)
    # An engine with profiles computes the logits that verifying needs, and no more a step.
    size = runner.max_chunk if executor.max_num_tokens is None else lookahead + 1
    for start in range(0, len(sequence), size):
        chunk = list(sequence[start : start + size])
        comparison.add("prefill", 0, start, runner.step(0, [RowWork(chunk, len(chunk))]))
        runner.kv.commit(0, start + len(chunk))


def _check_widths(executor: Executor, sequence: Sequence[int], lookahead: int, comparison: _Comparison) -> None:
    runner = ModelRunner(executor)
    # Widths are tried on a short past and on the longest one, whose cache entries span many blocks.
    for first_past in dict.fromkeys((3, max(0, len(sequence) - 2 * (lookahead + 1)))):
        runner.kv.release(0)
        past = 0
        for width in range(1, min(lookahead + 1, len(sequence)) + 1):
            goal = min(first_past + width - 1, len(sequence) - width)
            if goal > past:
                runner.prefill(0, list(sequence[past:goal]))
            runner.kv.commit(0, goal)
            past = goal
            logits = runner.step(0, [RowWork(list(sequence[past : past + width]), width, drafts=width)])
            comparison.add(f"width {width}", 0, past, logits)
            # Nothing of it is committed: the next width overwrites these entries.


def _check_ragged(
    executor: Executor, sequences: Sequence[Sequence[int]], lookahead: int, comparison: _Comparison
) -> None:
    """Rounds as decoding makes them: every row takes its own number of tokens and keeps its own number of them."""
    runner = ModelRunner(executor)
    random = np.random.default_rng(11)
    width = lookahead + 1
    for row, sequence in enumerate(sequences):
        past = min(len(sequence) // 2, max(0, len(sequence) - 2 * width))
        if past:
            runner.prefill(row, list(sequence[:past]))
    for _ in range(_MAX_RAGGED_STEPS):
        pasts = [runner.kv.kv_len(row) for row in range(len(sequences))]
        most = [min(width, len(sequence) - past) for sequence, past in zip(sequences, pasts, strict=True)]
        if not any(most):
            break
        # Wrong tokens first, as a rejected draft leaves them: never committed, so they must not be seen.
        wrong = [random.integers(0, executor.vocab_size, limit).tolist() for limit in most]
        runner.step(0, [RowWork(tokens, min(len(tokens), 1), drafts=len(tokens)) for tokens in wrong])
        counts = [int(random.integers(0, limit + 1)) for limit in most]
        if not any(counts):
            counts = most
        work = [
            RowWork(list(sequence[past : past + count]), count, drafts=count)
            for sequence, past, count in zip(sequences, pasts, counts, strict=True)
        ]
        logits = runner.step(0, work)
        start = 0
        for row, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            if count:
                comparison.add("ragged", row, past, logits[start : start + count])
            start += count
            runner.kv.commit(row, past + int(random.integers(0, count + 1)))
