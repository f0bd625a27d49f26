"""A token's logits depend on the tokens before it, not on what else is in the step.

Verifying K+1 tokens in one step is lossless only if each gets the logits that it would get alone. Quantization can
break that: one activation scale for a whole step (``quantize_dynamic``) lets a large value anywhere coarsen every other
token.
Here the same tokens are stepped

::

    alone           one at a time, nothing else in the step: the reference
    2 … K+1         so many at a time, beside their own successors
    behind pieces   K+1 at a time, where what is before them was read in other pieces
    beside others   one at a time, and K+1 at a time, with other sequences in the step

No checkpoint is needed: the engine is compared with itself. On a CPU the bits must be the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexport.verify.tolerance import logit_scale
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import MAX_CHUNK, Executor, Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork

LEAST_TOKENS = 3
"""Of a sequence: one before, and two that are neighbours."""
_MAX_PAST = 506
"""The tokens looked at then lie on both sides of entry 512, where attention of long rows is cut in parts."""
_MAX_TOKENS = 12
_NUM_ROWS = 4
_PIECE = 7  # divides no size that a kernel works in


@dataclass(frozen=True)
class NeighbourCase:
    """The subject's tokens in one company."""

    name: str  # what shares the step, in words
    rows: int  # logit rows compared
    max_relative: float  # largest difference from the same token alone, over the logit scale
    median_relative: float  # the median over the rows of their largest difference, over the logit scale
    argmax_agreement: float  # share of rows with the same most likely token
    same_bits: int  # rows whose logits have the bits that they have alone
    passed: bool  # every difference is within the tolerance; with a tolerance of 0, every bit is the same


@dataclass(frozen=True)
class NeighbourResult:
    """One engine against itself."""

    role: str  # ``"target"`` or ``"draft"``
    passed: bool
    cases: tuple[NeighbourCase, ...]  # one for each company
    tolerance: float  # largest difference allowed, relative to the logit scale; 0 demands the same bits
    compared: str  # in words

    @property
    def max_relative(self) -> float:
        """Largest relative difference of all cases (NaN if any is)."""
        return float(np.max([case.max_relative for case in self.cases]))


def check_neighbours(
    role: str,  # ``"target"`` or ``"draft"``, for the report
    executor: Executor,
    sequences: Sequence[
        Sequence[int]
    ],  # token ids: the subject and its company, none longer than a cache row less K+1 entries
    *,
    lookahead: int,  # K
    tolerance: float = 0.0,  # see ``tolerance.step_tolerance``
) -> NeighbourResult:
    """Step the end of ``sequences[0]`` alone and in company, and compare the logits; the engine must be idle."""
    if not sequences or min(map(len, sequences)) < LEAST_TOKENS:
        raise InvalidRequestError(
            f"the neighbours part needs sequences of {LEAST_TOKENS} tokens or more.", "give longer prompts."
        )
    company = [list(ids) for ids in sequences[1 : min(_NUM_ROWS, executor.num_rows)]]
    subject = _Subject(executor, list(sequences[0]))
    width = min(lookahead + 1, len(subject.tokens))
    alone = subject.step_through(1, [])
    found = {f"{count} at a time": subject.step_through(count, []) for count in range(2, width + 1)}
    found[f"{width} at a time behind pieces of {_PIECE}"] = subject.step_through(width, [], piece=_PIECE)
    if company:
        others = f"beside {len(company)} other rows"
        found[f"1 at a time {others}"] = subject.step_through(1, company)
        found[f"{width} at a time {others}"] = subject.step_through(width, company)
    cases = tuple(_compare(name, logits, alone, tolerance) for name, logits in found.items())
    compared = f"{len(alone)} tokens behind {subject.past}, each against the same token alone in a step"
    return NeighbourResult(role, all(case.passed for case in cases), cases, tolerance, compared)


class _Subject:
    """Row 0 with the tokens whose logits are looked at; ``past`` tokens before them are prefilled each time."""

    def __init__(self, executor: Executor, sequence: list[int]) -> None:
        self._executor = executor
        self.past = min(_MAX_PAST, max(len(sequence) // 2, len(sequence) - _MAX_TOKENS))
        self._before = sequence[: self.past]
        self.tokens = sequence[self.past : self.past + _MAX_TOKENS]

    def step_through(self, width: int, company: Sequence[list[int]], *, piece: int = MAX_CHUNK) -> Float32Array:
        """Logits [n, V] of the subject's tokens, ``width`` a step, each of ``company`` taking as many in its row."""
        runner = ModelRunner(self._executor, max_chunk=piece)
        runner.prefill(0, self._before)
        # The first companion stays at its first token, where activations are largest in most models.
        pasts = [0 if row == 0 else min(self.past, len(ids) // 2) for row, ids in enumerate(company)]
        for row, (ids, past) in enumerate(zip(company, pasts, strict=True), start=1):
            if past:
                runner.prefill(row, ids[:past])
        found = []
        for start in range(0, len(self.tokens), width):
            own = self.tokens[start : start + width]
            work = [RowWork(own, len(own))]
            # Nothing of the companions is committed: they take the same tokens again in each step.
            others = [ids[past : past + width] for ids, past in zip(company, pasts, strict=True)]
            work += [RowWork(tokens, 1, drafts=len(tokens)) for tokens in others]
            found.append(runner.step(0, work)[: len(own)].copy())
            runner.kv.commit(0, self.past + start + len(own))
        logits: Float32Array = np.concatenate(found)
        return logits


def _compare(name: str, logits: Float32Array, alone: Float32Array, tolerance: float) -> NeighbourCase:
    with np.errstate(invalid="ignore"):  # infinities that should not be there become NaN, which fails
        errors = np.abs(logits - alone).max(axis=1) / logit_scale(alone)
    same = logits.argmax(axis=1) == alone.argmax(axis=1)
    bits = int((logits.view(np.uint32) == alone.view(np.uint32)).all(axis=1).sum())
    # False for NaN, whatever its bits are.
    passed = bool(errors.max() <= tolerance) and (tolerance > 0 or bits == len(errors))
    largest, typical = float(errors.max()), float(np.median(errors))
    return NeighbourCase(name, len(errors), largest, typical, float(same.mean()), bits, passed)
