"""Rows of logits on a CPU, queried as those that stay on a GPU are: the library of operators draws from them.

A row is queried when it is first asked for, so that one after a refused token costs nothing.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.device_rows import AS_FOUND, DeviceRow, Float32Array, RowSource, RowStepBuffers
from specexport_runtime.executors.logit_rows import NO_TOKEN, LogitRow, LogitRows, NumpyRows
from specexport_runtime.executors.row_cuts import RowCuts, library
from specexport_runtime.executors.row_kernels import (
    ASK,
    BLOCK,
    FOUND,
    MAX_CUT,
    UNKNOWN,
    ResidualAsk,
    ResidualQuery,
    ResidualResult,
    RowAsk,
    RowQuery,
    RowResult,
)

_TOO_MANY = 2.0**31

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead


def open_host_rows(width: int, num_slots: int) -> "HostRows | None":
    """What draws from rows of ``width`` logits; None without the library."""
    try:
        return HostRows(width, num_slots)
    except SpecexportError:
        return None


class HostRowsMixin(Executor):
    """An executor whose logits lie in this process's memory; ``attach_library`` is called when it is made."""

    rows: "HostRows | None" = None  # None without the library
    _names_rows = True

    def attach_library(self) -> None:
        """Let the library draw from its rows, if it is here."""
        self.rows = open_host_rows(self.vocab_size, self.num_rows)
        self.keeps_rows = self.rows is not None

    def execute_rows(self, asks: Sequence[RowAsk]) -> LogitRows:
        """See ``Executor.execute_rows``."""
        if not (asks and self.keeps_rows and self._names_rows) or self.rows is None:
            return super().execute_rows(asks)
        return self.rows.collect(asks, self.execute("logits"))

    def set_head(self, head: "CutHead | None") -> None:
        """See ``Executor.set_head``."""
        super().set_head(head)
        self._names_rows = self.rows is not None and self.rows.name(head)


class HostRows(RowSource):
    """Draws from the rows of logits [R, V] of one executor's steps."""

    k_inline = MAX_CUT

    def __init__(self, width: int, num_slots: int) -> None:
        self.width, self.generation, self._num_slots = width, 0, num_slots
        _, _, self._find, self._residual = library()
        blocks = -(-width // BLOCK)
        self._lane = RowStepBuffers(0, 0, np.zeros((1, ASK)), np.zeros(FOUND + MAX_CUT))
        self._memory = [np.zeros(blocks, kind) for kind in (np.float32, np.float32, np.float64)]  # of the library
        self._scratch = [_address(each) for each in self._memory]
        self._query = RowQuery.from_buffer(self._lane.asks.data)
        self._inline = self._lane.host_found + 8 * FOUND
        result = RowResult.from_buffer(self._lane.found.data)
        self._found = (self._query, result, self._inline, self._inline + 4 * MAX_CUT, *self._scratch)
        self._logits: Float32Array = np.zeros((0, width), np.float32)
        self._at_logits, self._pitch = 0, 0
        self._kept: list[Float32Array] = []  # of ``num_slots`` rows each
        self._at_kept: list[int] = []
        self._head: CutHead | None = None
        self._wide: Float32Array = np.zeros(0, np.float32)  # the last row of a cut LM head that was asked for

    def name(self, head: "CutHead | None") -> bool:
        """The ids of the LM head's rows; False if they are in no order, and are not drawn from by these."""
        is_ordered = head is None or bool((np.diff(head.ids) > 0).all())
        self._head = head if is_ordered else None
        return is_ordered

    def collect(self, asks: Sequence[RowAsk], logits: Float32Array) -> LogitRows:
        """The rows of a step, until the next one."""
        return _Rows(self, asks, self.begin(logits), self._head)

    def begin(self, logits: Float32Array) -> Float32Array:
        """A step has these rows [R, V], which are given as they lie in memory."""
        if logits.shape[1] != self.width:
            raise SpecexportError(f"rows have {logits.shape[1]} logits, and not {self.width}.")
        self.generation += 1
        self._logits = logits = np.ascontiguousarray(logits)
        self._at_logits, self._pitch = _address(logits), 4 * logits.shape[1]
        return logits

    def query(self, place: int, ask: RowAsk) -> DeviceRow:
        """What is asked of a row of the last step; a row with a slot is kept there."""
        rule, step_buffers, head = ask.rule, self._lane, self._head
        address = self._at_logits + place * self._pitch
        if ask.slot >= 0:
            kept = self._keep_row(ask.slot)
            ctypes.memmove(kept, address, self._pitch)
            address = kept
        if rule.fetch and not rule.temperature:
            return DeviceRow(self, place, ask, UNKNOWN, NO_TOKEN, address, self.generation)
        if step_buffers.rules != (rule,):
            step_buffers.set_rules((rule,))
        self._query.uniform, self._query.token = ask.uniform, ask.token
        self._find(address, self.width if head is None else len(head.ids), *self._found)
        found = AS_FOUND(step_buffers.found[:FOUND].tolist())
        if head is not None and found.likeliest >= 0:
            found = found._replace(drawn=head.ids[int(found.drawn)], likeliest=head.ids[int(found.likeliest)])
            ids = step_buffers.found[FOUND:].view(np.int32)[: min(int(found.candidates), MAX_CUT)]
            ids[:] = head.ids[ids]
        if found.candidates > MAX_CUT:
            found = found._replace(candidates=_TOO_MANY)
        token, found = int(found.likeliest), found if rule.temperature else UNKNOWN
        made = DeviceRow(self, place, ask, found, token, address, self.generation)
        if rule.cuts and found.candidates <= MAX_CUT:
            made.cuts = RowCuts(
                1, MAX_CUT, step_buffers.host_asks, step_buffers.host_found, step_buffers.host_kept_masses, self._inline
            )
            made.cut_at = 0
        return made

    def slot(self, slot: int) -> int:
        """Where a kept row lies, with all ids, until the next one is asked for."""
        address = self._keep_row(slot)
        return address if self._head is None else _address(self._widened(self._view(address, len(self._head.ids))))

    def _keep_row(self, slot: int) -> int:
        group, place = divmod(slot, self._num_slots)
        while group >= len(self._kept):
            self._kept.append(np.empty((self._num_slots, self.width), np.float32))
            self._at_kept.append(_address(self._kept[-1]))
        return self._at_kept[group] + 4 * place * self.width

    def _view(self, address: int, count: int) -> Float32Array:
        return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))

    def _widened(self, row: Float32Array) -> Float32Array:
        if self._head is not None:
            self._wide = self._head.widen(row[: len(self._head.ids)])
            return self._wide
        return row

    def fetch(self, place: int, address: int | None) -> Float32Array:
        """A row [V]: the memory itself, where no LM head was cut."""
        if address is None:
            return self._widened(self._logits[place])
        if self._head is not None:
            return self._wide if address == _address(self._wide) else self._widened(self._logits[place])
        return self._view(address, self.width)

    def residuals(self, asks: Sequence[ResidualAsk]) -> list[tuple[float, int]]:
        """Sum and token of each."""
        made, result = [], ResidualResult()
        for ask in asks:
            self._residual(ResidualQuery(*ask), self._scratch[-1], result)
            made.append((result.total, int(result.token)))
        return made


class _Rows(NumpyRows):
    """The rows of a step, each queried once."""

    def __init__(self, source: HostRows, asks: Sequence[RowAsk], logits: Float32Array, head: "CutHead | None") -> None:
        super().__init__(logits, asks, head)
        self._source = source
        self._made: dict[int, DeviceRow] = {}

    def __getitem__(self, place: int) -> LogitRow:
        if (row := self._made.get(place)) is None:
            row = self._made[place] = self._source.query(place, self._asks[place])
        return row


def _address(memory: np.ndarray) -> int:
    address: int = memory.ctypes.data
    return address
