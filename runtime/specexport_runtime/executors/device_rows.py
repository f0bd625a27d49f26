"""Rows of logits that stay on a GPU: tokens are drawn there, and only what a host asks for leaves it.

A step's rows come with what is asked of each (``RowAsk``). The kernels run behind the step on its stream, so that it
still has one wait. What is asked later (a residual, more candidates, a whole row) costs a wait of its own. Every number
and sum is float64, ids ascend: a draw is the host's but for rounding.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.gpu import ALIGNMENT, ByteArray, GpuDriver
from specexport_runtime.executors.row_kernels import (
    ARGUMENTS,
    ASK,
    BINS,
    BLOCK,
    FEW,
    FOUND,
    MANY,
    PARTS,
    SURPLUS_FORM,
    UNKNOWN,
    RowAsk,
    RowFound,
    SurplusAsk,
    ptx_path,
)

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
_FEW_BYTES = 8 * FEW  # ids int32, and logits float32
_FOUND_BYTES = 8 * FOUND
_SURPLUS = struct.Struct(SURPLUS_FORM)
LEAST_ROWS = 64
"""Rows of a step for which there is memory at the least."""


class RowCounts:
    """What left the device since an executor was opened."""

    def __init__(self) -> None:
        self.steps = 0  # with rows that stay
        self.bytes = 0  # to the host, rows that were fetched included
        self.fetches = 0  # rows of logits that came to the host
        self.waits = 0  # beside those of the steps


class Kernel(NamedTuple):
    """A kernel that a driver has loaded."""

    handle: int
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory


def load_kernels(driver: GpuDriver) -> dict[str, Kernel]:
    """The kernels of ``row_kernels`` by name; SpecexportError if the driver takes none of them."""
    found = {}
    for name in ARGUMENTS:
        ptx = ptx_path(name).read_text(encoding="utf-8")
        threads, shared = (int(word.split()[-1]) for word in ptx.partition("\n")[0].split(","))
        found[name] = Kernel(driver.load_kernel(ptx, name), threads, shared)
    return found


def open_sampler(driver: GpuDriver, width: int, num_slots: int) -> "RowSampler | None":
    """What draws from an executor's rows of ``width`` logits; None where the driver runs no kernels, or not these."""
    if not driver.runs_kernels or width > BLOCK * PARTS:
        return None
    try:
        return RowSampler(driver, width, num_slots)
    except SpecexportError as error:
        _log.warning("tokens are drawn on the host: %s", error)
        return None


class _Lane(NamedTuple):
    """What is asked and found in one step: steps of a chain have one each."""

    at_asks: int
    at_found: int
    asks: npt.NDArray[np.float64]  # pinned
    found: npt.NDArray[np.float64]


class RowSampler:
    """Draws from the rows of logits [R, V] float32 that the steps of one executor leave on the device."""

    def __init__(self, driver: GpuDriver, width: int, num_slots: int) -> None:
        self.counts = RowCounts()
        self.width, self.generation = width, 0
        self._driver, self._num_slots = driver, num_slots
        self._kernels = load_kernels(driver)
        self._blocks = -(-width // BLOCK)
        self._address = 0  # of the last step's logits
        self._max_rows = 0  # for which there is memory
        self._slots: list[int] = []  # addresses of ``num_slots`` rows each
        self._memory: list[int] = []
        self._pinned: list[ByteArray] = []
        self._rows: dict[int, ByteArray] = {}  # pinned memory of fetched rows, by place
        self._lanes: list[_Lane] = []

    def reserve(self, rows: int, steps: int) -> None:
        """Take the memory for steps of so many ``rows``, and for as many ``steps`` of a chain whose rows are kept.

        IncompatibleError if the GPU has not so much; more is taken when a step needs it.
        """
        self._allocate(max(rows, LEAST_ROWS))
        self._lanes += [self._make_lane() for _ in range(max(steps, 1))]
        if steps:
            self._slot(steps * self._num_slots - 1)

    def put(self, asks: Sequence[RowAsk], logits: int, *, token_ids: int = 0, step: int = 0) -> None:
        """Put on the stream, behind a step, what is asked of its rows, which lie at an address.

        In a chain, of which this is the n-th ``step`` from 0 on, tokens that are drawn take the places of the greedy
        ones at ``token_ids``; all its steps have the same number of rows.
        """
        rows = len(asks)
        if rows > self._max_rows:
            self._allocate(max(rows, 2 * self._max_rows, LEAST_ROWS))
        while len(self._lanes) <= step:
            self._lanes.append(self._make_lane())
        lane = self._lanes[step]
        self.generation += 1
        self._address = logits
        driver, columns = self._driver, list(zip(*asks, strict=True))
        temperatures, *_, cuts, slots, comes = columns
        if any(temperatures):
            lane.asks[:rows].T[:] = columns[:ASK]
            driver.copy_in(lane.at_asks, int(lane.asks.ctypes.data), 8 * ASK * rows)
            parts = (lane.at_asks, self._at_tops, self._at_sums)
            self._launch("weigh", (rows, self._blocks), logits, *parts, self.width, self._blocks)
            found = (lane.at_found, self._at_bins, token_ids or self._at_bins)
            self._launch("draw", (rows, 1), logits, *parts, *found, self.width, self._blocks, int(token_ids > 0))
            size = _FOUND_BYTES * rows
            if any(cuts):
                size += _FEW_BYTES * rows
                self._put_cuts(asks, lane)
            driver.copy_out(int(lane.found.ctypes.data), lane.at_found, size)
            self.counts.bytes += size
        row_bytes = 4 * self.width
        if max(slots) >= 0:
            kept = [self._slot(slot) if slot >= 0 else -1 for slot in slots]
            for first, count in _runs(kept, row_bytes):
                driver.copy_rows(kept[first], logits + first * row_bytes, row_bytes, count, row_bytes)
        if any(comes):
            for i in np.flatnonzero(comes).tolist():
                self._put_row(i, logits + i * row_bytes)
        self.counts.steps += 1

    def _put_cuts(self, asks: Sequence[RowAsk], lane: _Lane) -> None:
        rows, places = len(asks), (len(asks), self._blocks)
        arguments = (self._address, lane.at_asks, lane.at_found, self._at_bins)
        if any(ask.top_p for ask in asks):
            self._launch("spread", places, *arguments, self.width)
        ids = lane.at_found + _FOUND_BYTES * rows
        many = self._at_many + 4 * MANY * self._max_rows
        self._launch("gather", places, *arguments, ids, ids + 4 * FEW * rows, self._at_many, many, self.width)

    def take(self, asks: Sequence[RowAsk], token_ids: Int64Array, *, step: int = 0) -> "DeviceRows":
        """What was found, after the wait; ``token_ids`` [R] are the greedy ones. ``step``: see :meth:`put`."""
        rows, answer = len(asks), self._lanes[step].found
        found = list(map(RowFound._make, answer[: FOUND * rows].reshape(rows, FOUND).tolist()))
        greedy = token_ids.tolist()
        ids: npt.NDArray[np.int32] | None = None
        values: Float32Array | None = None
        if any(ask.cuts for ask in asks):
            few = answer[FOUND * rows :][: _FEW_BYTES // 8 * rows].copy()
            ids = few.view(np.int32)[: FEW * rows].reshape(rows, FEW)
            values = few.view(np.float32)[FEW * rows :].reshape(rows, FEW)
        made = []
        for i, ask in enumerate(asks):
            address = self._slot(ask.slot) if ask.slot >= 0 else self._address + 4 * i * self.width
            row = DeviceRow(self, i, ask, found[i] if ask.temperature else UNKNOWN, greedy[i], address)
            if ids is not None and values is not None:
                row.few = ids[i], values[i]
            made.append(row)
        return DeviceRows(made)

    def take_chain(self, asks: Sequence[Sequence[RowAsk]], token_ids: Sequence[Int64Array]) -> "list[DeviceRows]":
        """What was found in the steps of a chain."""
        return [self.take(*each, step=step) for step, each in enumerate(zip(asks, token_ids, strict=True))]

    def fetch(self, place: int, address: int) -> Float32Array:
        """A row [V], in memory of that place that the next fetch overwrites; waits."""
        self._put_row(place, address)
        self.wait()
        return self.come(place)

    def come(self, place: int) -> Float32Array:
        """A row [V] that came with its step."""
        return self._rows[place].view(np.float32)

    def _put_row(self, place: int, address: int) -> None:
        if place not in self._rows:
            self._rows[place] = self._driver.allocate_host(4 * self.width)
        self._driver.copy_out(int(self._rows[place].ctypes.data), address, 4 * self.width)
        self.counts.bytes += 4 * self.width
        self.counts.fetches += 1

    def wait(self) -> None:
        """Wait for what was asked outside of a step."""
        self._driver.synchronize()
        self.counts.waits += 1

    def candidates(self, place: int, count: int) -> tuple[npt.NDArray[np.int32], Float32Array]:
        """Ids and logits of the ``count`` candidates of the last step's row, in any order; waits."""
        host = int(self._many.ctypes.data)
        for part in range(2):
            source = self._at_many + 4 * MANY * (part * self._max_rows + place)
            self._driver.copy_out(host + 4 * MANY * part, source, 4 * count)
        self.counts.bytes += 8 * count
        self.wait()
        found = self._many.copy()
        return found.view(np.int32)[:count], found.view(np.float32)[MANY:][:count]

    def surpluses(self, asks: Sequence[SurplusAsk]) -> list[tuple[float, int]]:
        """Sum and token of each, of no more pairs than the last step had rows. Waits."""
        count = len(asks)
        for i, ask in enumerate(asks):
            _SURPLUS.pack_into(self._surplus_asks.data, i * _SURPLUS.size, *ask)
        asked, found = self._at_surplus_asks, self._at_surplus
        self._driver.copy_in(asked, int(self._surplus_asks.ctypes.data), _SURPLUS.size * count)
        at = (asked, asked + 8 * SurplusAsk._fields.index("target"), self._at_sums)
        self._launch("weigh_surplus", (count, self._blocks), *at, self._blocks)
        self._launch("draw_surplus", (count, 1), *at, found, self._blocks)
        self._driver.copy_out(int(self._surplus.ctypes.data), found, 16 * count)
        self.counts.bytes += 16 * count
        self.wait()
        numbers = self._surplus[: 2 * count].tolist()
        return [(total, int(token)) for total, token in zip(numbers[::2], numbers[1::2], strict=True)]

    def _launch(self, name: str, grid: tuple[int, int], *arguments: int) -> None:
        kernel = self._kernels[name]
        self._driver.launch_kernel(kernel.handle, (*grid, 1), kernel.threads, kernel.shared, arguments)

    def _slot(self, slot: int) -> int:
        """Where a kept row lies."""
        group, place = divmod(slot, self._num_slots)
        while group >= len(self._slots):
            self._slots.append(self._driver.allocate(4 * self.width * self._num_slots, "logits of drafts"))
        return self._slots[group] + 4 * place * self.width

    def _allocate(self, rows: int) -> None:
        """Memory for steps of up to so many rows, in place of what there was."""
        self._free()
        blocks = self._blocks
        (
            self._at_tops, self._at_sums, self._at_bins, self._at_many, self._at_surplus_asks, self._at_surplus,
        ) = self._take_memory(
            4 * rows * blocks, 8 * rows * blocks, 8 * rows * BINS, 8 * MANY * rows, _SURPLUS.size * rows, 16 * rows
        )  # fmt: skip
        sizes = (8 * MANY, _SURPLUS.size * rows, 16 * rows)
        self._many, self._surplus_asks, self._surplus = map(self._pin, sizes)
        self._max_rows = rows

    def _make_lane(self) -> _Lane:
        rows, found = self._max_rows, self._max_rows * (_FOUND_BYTES + _FEW_BYTES)
        at_asks, at_found = self._take_memory(8 * ASK * rows, found)
        return _Lane(at_asks, at_found, self._pin(8 * ASK * rows).reshape(rows, ASK), self._pin(found))

    def _take_memory(self, *sizes: int) -> list[int]:
        """Device memory for several things, one behind the other."""
        places = np.cumsum([0, *[-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]]).tolist()
        self._memory.append(self._driver.allocate(places[-1], "draws from logits"))
        return [self._memory[-1] + place for place in places[:-1]]

    def _pin(self, num_bytes: int) -> npt.NDArray[np.float64]:
        self._pinned.append(self._driver.allocate_host(num_bytes))
        return self._pinned[-1].view(np.float64)

    def _free(self) -> None:
        for address in self._memory:
            self._driver.free(address)
        for memory in self._pinned:
            self._driver.free_host(memory)
        self._memory, self._pinned, self._lanes, self._max_rows = [], [], [], 0

    def close(self) -> None:
        """Give everything back; no row may be used any more."""
        self._free()
        for address in self._slots:
            self._driver.free(address)
        for memory in self._rows.values():
            self._driver.free_host(memory)
        self._slots, self._rows = [], {}


def _runs(addresses: Sequence[int], pitch: int) -> Iterator[tuple[int, int]]:
    """Places and lengths of the runs whose addresses lie ``pitch`` apart; below 0 there is none."""
    first = 0
    for i, address in enumerate(addresses):
        if i > first and address != addresses[i - 1] + pitch:
            if addresses[first] >= 0:
                yield first, i - first
            first = i
    if addresses and addresses[first] >= 0:
        yield first, len(addresses) - first


class DeviceRow:
    """One row of logits [V] of a step; valid until the next step, or, if it was kept, until its slot is used again."""

    __slots__ = ("_address", "_generation", "_place", "_sampler", "ask", "few", "found", "token_id")

    def __init__(
        self, sampler: RowSampler, place: int, ask: RowAsk, found: RowFound, token_id: int, address: int
    ) -> None:
        self._sampler, self._place, self._address = sampler, place, address
        self._generation = sampler.generation
        self.ask = ask
        self.found = found
        self.token_id = token_id  # the greedy one, of all V; ``NO_TOKEN`` if the row holds a NaN
        self.few: tuple[npt.NDArray[np.int32], Float32Array] | None = None  # the first candidates

    def fetch(self) -> Float32Array:
        """The ids that count, on the host in memory that is used again. SpecexportError: it is no longer there."""
        is_last = self._generation == self._sampler.generation
        if not is_last and self.ask.slot < 0:
            raise SpecexportError("this row of logits was overwritten by a later step.")
        came = self.ask.comes and is_last
        row = self._sampler.come(self._place) if came else self._sampler.fetch(self._place, self._address)
        return row[: self.ask.width or None]

    def candidates(self) -> tuple[Int64Array, Float32Array] | None:
        """Ids, ascending, and logits of all that the asked cut may keep; None if they are too many."""
        count = int(self.found.candidates)
        if count > MANY or self.few is None or (count > FEW and self._generation != self._sampler.generation):
            return None
        ids, values = self.few if count <= FEW else self._sampler.candidates(self._place, count)
        order = ids[:count].argsort()
        return ids[order].astype(np.int64), values[order]

    def surplus_ask(self, draft: "DeviceRow | None", token: int, weight: float) -> SurplusAsk:
        """To ask for max(0, w q - p) at this row's uniform.

        q is this row's softmax and p ``draft``'s, at the temperatures they were asked with; None: one-hot at ``token``.
        """
        ask, found = self.ask, self.found
        if draft is None:
            other: tuple[float, int, float, float] = (1.0, 0, 0.0, 1.0)
            at = self._address
        else:
            other = (draft.ask.temperature, draft.ask.width, draft.found.peak, draft.found.total)
            at, token = draft._address, -1
        mine = (ask.temperature, ask.width, found.peak, found.total)
        return SurplusAsk(*mine, *other, weight, token, ask.uniform, self._address, at)

    def surpluses(self, asks: Sequence[SurplusAsk]) -> list[tuple[float, int]]:
        """Sum and token of what was asked of rows of this row's step; waits."""
        return self._sampler.surpluses(asks)


class DeviceRows(Sequence[DeviceRow]):
    """The rows of logits of a step."""

    def __init__(self, rows: Sequence[DeviceRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DeviceRow]:
        return iter(self._rows)

    @overload
    def __getitem__(self, place: int) -> DeviceRow: ...
    @overload
    def __getitem__(self, place: slice) -> "DeviceRows": ...
    def __getitem__(self, place: int | slice) -> "DeviceRow | DeviceRows":
        return DeviceRows(self._rows[place]) if isinstance(place, slice) else self._rows[place]

    def fetch(self) -> Float32Array:
        """All of them on the host, [R, V]."""
        return np.stack([row.fetch() for row in self._rows])
