"""Logits of an engine over cases, and how far two sets of them are apart: two phases, of which every proof is made.

:class:`OutputRun` steps texts through an engine, and keeps logits under the names of cases, each with its place in a
text. :func:`compare_case` holds a case against logits of the same places, whatever gave them: eager transformers,
another engine, or the same engine in other steps. A :class:`~specexport.rounding.LogitTolerance` says what is allowed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.rounding import LogitTolerance
from specexport_runtime.executors.base import MAX_CHUNK, Executor, Float32Array
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork

Place = tuple[int, int]
"""A text, by its cache row, and a position in it."""
Rows = list[tuple[Place, Float32Array]]
"""Logits [V] of places, one of which may come several times."""


class OutputRun:
    """Texts, one in each cache row from row 0 on, in an engine that runs nothing else meanwhile."""

    def __init__(
        self,
        executor: Executor,
        texts: Sequence[Sequence[int]],  # token ids
        *,
        max_chunk: int = MAX_CHUNK,  # most tokens of a prefill step
        unpad_kv: bool = True,  # False for a padded-KV graph
    ) -> None:
        self.runner = ModelRunner(executor, max_chunk=max_chunk, unpad_kv=unpad_kv)
        self.texts = [list(text) for text in texts]
        self.cases: dict[str, Rows] = {}

    def past(self, row: int = 0) -> int:
        """Entries of a row that count."""
        return self.runner.kv.kv_len(row)

    def go_to(self, row: int, past: int) -> None:
        """Read a text up to there, or roll back to there."""
        if past > self.past(row):
            self.runner.prefill(row, self.texts[row][self.past(row) : past])
        else:
            self.runner.kv.commit(row, past)

    def step(
        self,
        case: str,
        counts: Sequence[int],  # tokens of each row, the next of its text
        *,
        kept: Sequence[int] | None = None,  # how many of them are committed; None for all
        wanted: Sequence[int] | None = None,  # how many of the last of them have their logits kept; None for all
        drafts: bool | Sequence[bool] = False,  # rows whose tokens are drafts in this step
    ) -> None:
        """Run one step of all rows, each at the end of what it holds."""
        wanted = counts if wanted is None else wanted
        are_drafts = [drafts] * len(counts) if isinstance(drafts, bool) else drafts
        pasts = [self.past(row) for row in range(len(counts))]
        work = [
            RowWork(text[past : past + count], rows, drafts=count * is_draft) if count else IDLE
            for text, past, count, rows, is_draft in zip(
                self.texts[: len(counts)], pasts, counts, wanted, are_drafts, strict=True
            )
        ]
        logits = iter(np.array(self.runner.step(0, work), np.float32))
        for row, (past, count, rows) in enumerate(zip(pasts, counts, wanted, strict=True)):
            places = [(row, position) for position in range(past + count - rows, past + count)]
            self.cases.setdefault(case, []).extend((place, next(logits)) for place in places)
            self.runner.kv.commit(row, past + (count if kept is None else kept[row]))


class Reference(NamedTuple):
    """What logits are held against."""

    logits: dict[Place, Float32Array]
    scales: dict[int, float]  # of each text: what tolerances are multiplied by, see :func:`logit_scale`

    @classmethod
    def of(cls, rows: Iterable[tuple[Place, Float32Array]]) -> "Reference":
        """Logits of places, as a run gives them."""
        logits, scales = dict(rows), dict[int, float]()
        for (text, _), row in logits.items():
            scales[text] = max(scales.get(text, 1.0), logit_scale(row))
        return cls(logits, scales)

    @classmethod
    def of_texts(cls, texts: Sequence[Float32Array]) -> "Reference":
        """Logits [len, V] of whole texts."""
        return cls.of(((row, at), logits) for row, text in enumerate(texts) for at, logits in enumerate(text))


def logit_scale(logits: Float32Array) -> float:
    """The largest finite magnitude of ``logits``, at least 1."""
    finite = np.abs(logits[np.isfinite(logits)])
    return max(1.0, float(finite.max())) if finite.size else 1.0


class Differences(NamedTuple):
    """Logits of places against a reference's: arrays [n]."""

    places: list[Place]
    largest: npt.NDArray[np.float64]  # difference of a place
    rms: npt.NDArray[np.float64]  # root mean square of a place's differences
    scales: npt.NDArray[np.float64]  # of the text
    same_best: npt.NDArray[np.bool_]  # the most likely token is the same
    same_bits: npt.NDArray[np.bool_]

    def within(self, tolerance: LogitTolerance) -> npt.NDArray[np.bool_]:
        """Which places are; NaN never is, and a tolerance of 0 demands the same bits."""
        near = (self.largest <= tolerance.largest * self.scales) & (self.rms <= tolerance.rms * self.scales)
        return near if tolerance.largest > 0 else near & self.same_bits


def compare_logits(rows: Rows, reference: Reference) -> Differences:
    """All logits whose text is in the reference, against the reference at the same places."""
    places, columns = [], []
    for place, ours in rows:
        if place[0] in reference.scales:
            theirs = reference.logits[place]
            with np.errstate(invalid="ignore"):  # infinities that should not be there become NaN, which fails
                difference = np.abs(ours - theirs)
                numbers = float(difference.max()), float(np.sqrt(np.square(difference).mean()))
            bits = np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
            places.append(place)
            columns.append((*numbers, reference.scales[place[0]], ours.argmax() == theirs.argmax(), bits))
    return Differences(places, *(np.array(column) for column in zip(*columns, strict=True)))


@dataclass(frozen=True)
class OutputCase:
    """One kind of step; relative numbers are over the logit scale of the text."""

    name: str  # ``"prefill"``, ``"width 3"``, ``"5 at a time beside 3 other rows"``
    rows: int  # logit rows compared
    max_abs: float  # largest absolute difference of a logit
    max_relative: float  # the same, relative
    median_relative: float  # the median over the rows of their largest difference
    max_rms: float  # largest root mean square of a row's differences
    argmax_agreement: float  # share of rows with the same most likely token
    same_bits: int  # rows whose logits have the bits of the reference
    passed: bool  # every difference is within the tolerance; with a tolerance of 0, every bit is the same


def compare_case(name: str, rows: Rows, reference: Reference, tolerance: LogitTolerance) -> OutputCase:
    """Hold one kind of step against a reference."""
    found = compare_logits(rows, reference)
    relative = found.largest / found.scales
    return OutputCase(
        name,
        len(found.places),
        max_abs=float(found.largest.max()),
        max_relative=float(relative.max()),
        median_relative=float(np.median(relative)),
        max_rms=float((found.rms / found.scales).max()),
        argmax_agreement=float(found.same_best.mean()),
        same_bits=int(found.same_bits.sum()),
        passed=bool(found.within(tolerance).all()),
    )


@dataclass(frozen=True)
class OutputResult:
    """One engine against a reference, in steps of several kinds."""

    role: str  # ``"target"`` or ``"draft"``
    cases: tuple[OutputCase, ...]  # one for each kind of step
    tolerance: float  # largest difference allowed, relative to the logit scale; 0 demands the same bits
    rms_tolerance: float  # largest root mean square of a row's differences allowed, relative to the logit scale
    compared: str  # in words
    passed: bool

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of all cases (NaN if any is)."""
        return float(np.max([case.max_abs for case in self.cases]))

    @property
    def max_relative(self) -> float:
        """Largest relative difference of all cases (NaN if any is)."""
        return float(np.max([case.max_relative for case in self.cases]))


def join_cases(role: str, cases: Iterable[OutputCase], tolerance: LogitTolerance, compared: str) -> OutputResult:
    """What came of all kinds of step; ``{rows}`` in ``compared`` becomes how many logit rows there were."""
    found = tuple(cases)
    words = compared.format(rows=sum(case.rows for case in found))
    return OutputResult(role, found, *tolerance, words, all(case.passed for case in found))


def relative_error(found: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Root mean square of the difference over that of the reference."""
    noise, signal = (float(np.square(each, dtype=np.float64).mean()) for each in (found - reference, reference))
    return float(np.sqrt(noise / signal)) if signal else float("inf") if noise else 0.0
