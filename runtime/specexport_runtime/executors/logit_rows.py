"""The rows of logits of a step, whoever holds them: numpy, the library of operators or a GPU.

What a sampler asks of a row (``RowAsk``) is told with the step. Here are rows of numpy's, which answer nothing but
their numbers; ``host_rows`` and ``device_rows`` have the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specexport_runtime.executors.row_kernels import NOTHING, UNKNOWN, RowAsk, RowFound

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
NO_TOKEN = -1
"""Stands for the greedy token of a row of logits that holds a NaN."""


def argmax_ids(logits: Float32Array) -> Int64Array:
    """The greedy token of each row of logits [R, V]: int64 [R], ``NO_TOKEN`` for a row that holds a NaN."""
    tokens: Int64Array = logits.argmax(axis=1)
    # argmax returns the first NaN if there is one, so this one look finds any NaN of the step.
    if len(tokens) == 1:  # a draft step of one sequence: arrays of one value cost more than the value
        best = logits[0, tokens[0]]
        if best != best:  # noqa: PLR0124 - only NaN is unequal to itself
            tokens[0] = NO_TOKEN
        return tokens
    best = logits[np.arange(len(tokens)), tokens]
    tokens[np.isnan(best)] = NO_TOKEN
    return tokens


class LogitRow(ABC):
    """One row of logits [V]; valid until the next step."""

    __slots__ = ()
    ask: RowAsk
    found: RowFound = UNKNOWN
    """What is known of it beside its numbers."""

    @property
    @abstractmethod
    def token_id(self) -> int:
        """The greedy token; ``NO_TOKEN`` if the row holds a NaN."""

    @abstractmethod
    def fetch(self) -> Float32Array:
        """The ids that count, on the host."""


class LogitRows(ABC):
    """The rows of logits of a step."""

    is_near = True
    """What is asked of a row costs no wait."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, place: int) -> LogitRow: ...

    def __iter__(self) -> Iterator[LogitRow]:
        return (self[place] for place in range(len(self)))

    @property
    @abstractmethod
    def token_ids(self) -> list[int]:
        """The greedy token of each row, ``NO_TOKEN`` for one with a NaN."""

    @abstractmethod
    def fetch(self, start: int, stop: int) -> Float32Array:
        """Some rows on the host, [n, V]."""


class NumpyRows(LogitRows):
    """Logits [R, N] in memory of this process, or no more of them than the greedy tokens [R].

    ``head`` says which token ids the first logits of a row are; None: each is its own number.
    """

    def __init__(self, output: npt.NDArray[Any], asks: Sequence[RowAsk] = (), head: "CutHead | None" = None) -> None:
        self._output, self._asks, self._head = output, asks, head

    def __len__(self) -> int:
        return len(self._output)

    @cached_property
    def token_ids(self) -> list[int]:
        """See the base class; a token that the head does not have counts as its first."""
        ids: list[int] = (self._output if self._output.ndim == 1 else argmax_ids(self._output)).tolist()
        if self._head is None:
            return ids
        named = self._head.ids
        return [token if token == NO_TOKEN else int(named[token if token < len(named) else 0]) for token in ids]

    def fetch(self, start: int, stop: int) -> Float32Array:
        """See the base class: the memory itself, where no LM head was cut."""
        rows: Float32Array = self._output[start:stop]
        return rows if self._head is None else np.stack([self._head.widen(row[: len(self._head.ids)]) for row in rows])

    def __getitem__(self, place: int) -> LogitRow:
        return _NumpyRow(self, place, self._asks[place] if self._asks else NOTHING)


class _NumpyRow(LogitRow):
    __slots__ = ("_place", "_rows", "ask")

    def __init__(self, rows: NumpyRows, place: int, ask: RowAsk) -> None:
        self._rows, self._place, self.ask = rows, place, ask

    @property
    def token_id(self) -> int:
        return self._rows.token_ids[self._place]

    def fetch(self) -> Float32Array:
        row: Float32Array = self._rows.fetch(self._place, self._place + 1)[0]
        return row[: self.ask.rule.width or None]
