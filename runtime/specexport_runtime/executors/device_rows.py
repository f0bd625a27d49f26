"""Rows of logits that stay on a GPU: tokens are drawn there, and only what a host asks for leaves it.

A step's rows come with what is asked of each (``RowAsk``). The kernels run after the step on its stream, so that it
still has one wait. What is asked later (a residual, more candidates, a whole row) costs a wait of its own. Every number
and sum is float64, ids ascend: a draw is the host's but for rounding.
"""

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.gpu import ALIGNMENT, ByteArray, GpuDriver
from specexport_runtime.executors.logit_rows import LogitRow, LogitRows
from specexport_runtime.executors.row_cuts import RowCuts, library
from specexport_runtime.executors.row_kernels import (
    ARGUMENTS,
    ASK,
    BINS,
    BLOCK,
    FOUND,
    K_INLINE,
    K_MAX,
    PARTS,
    RULE_PLACES,
    UNKNOWN,
    ResidualAsk,
    ResidualQuery,
    RowAsk,
    RowFound,
    RowQuery,
    RowRule,
    ptx_path,
)

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
_INLINE_BYTES = 8 * K_INLINE  # ids int32, and logits float32
_FOUND_BYTES = 8 * FOUND
_RESIDUAL_BYTES = ctypes.sizeof(ResidualQuery)
_SHARE = 64  # candidates that are more than this part of the ids cost as much as the row
_UNIFORM, _TOKEN = RowQuery.uniform.offset // 8, RowQuery.token.offset // 8
AS_FOUND = partial(tuple.__new__, RowFound)
MIN_ROWS = 64
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


class RowStepBuffers:
    """What is asked and found in one step: steps of a chain have one each."""

    def __init__(self, at_asks: int, at_found: int, asks: Float64Array, found: Float64Array) -> None:
        self.at_asks, self.at_found = at_asks, at_found
        self.asks, self.found = asks, found  # pinned
        self.host_asks, self.host_found = int(asks.ctypes.data), int(found.ctypes.data)
        self.rules: tuple[RowRule, ...] = ()  # that ``asks`` has
        self.draws, self.cuts, self.spreads = False, False, False
        self.fetched: list[int] = []  # rows
        self._kept_masses = np.ones(len(asks))
        self.host_kept_masses = int(self._kept_masses.ctypes.data)
        self.slots: tuple[int, ...] = ()  # of which ``runs`` are
        self.runs: list[tuple[int, int, int]] = []  # first row, rows, and where they are kept

    def set_rules(self, rules: tuple[RowRule, ...]) -> None:
        """Ask by these rules from now on."""
        numbers = np.array(rules)
        self.asks[: len(rules), RULE_PLACES] = numbers[:, : len(RULE_PLACES)]
        self._kept_masses[: len(rules)] = [rule.kept_mass for rule in rules]
        self.draws = any(rule.temperature for rule in rules)
        self.cuts, self.spreads = any(rule.cuts for rule in rules), any(rule.top_p for rule in rules)
        self.fetched = [i for i, rule in enumerate(rules) if rule.fetch]
        self.rules = rules

    def set_params(self, rows: int, uniforms: float | Sequence[float], tokens: int | Sequence[int]) -> None:
        """Ask of the first ``rows`` rows with these."""
        self.asks[:rows, _UNIFORM] = uniforms
        self.asks[:rows, _TOKEN] = tokens


class RowSource(ABC):
    """Whose rows they are."""

    generation: int
    """Steps so far."""
    k_inline: int
    """Candidates of a row that a cut can leave at no further cost."""

    @abstractmethod
    def slot(self, slot: int) -> int:
        """Where a kept row lies."""

    @abstractmethod
    def fetch(self, place: int, address: int | None) -> Float32Array:
        """A row [V], in memory of that place that the next fetch overwrites; waits, if it did not come (None)."""

    def candidates(self, place: int, count: int) -> tuple[npt.NDArray[np.int32], Float32Array] | None:  # noqa: ARG002
        """Ids and logits of the ``count`` candidates of the last step's row, in any order; waits. None: not kept."""
        return None

    @abstractmethod
    def residuals(self, asks: Sequence[ResidualAsk]) -> list[tuple[float, int]]:
        """Sum and token of each, of no more pairs than the last step had rows. Waits."""


class RowSampler(RowSource):
    """Draws from rows of logits [R, V] float32 on the device; SpecexportError without kernels or operators."""

    k_inline = K_INLINE

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
        self._step_buffers: list[RowStepBuffers] = []
        library()

    def reserve(self, rows: int, steps: int) -> None:
        """Take memory for so many ``rows``, and ``steps`` of a chain, or IncompatibleError; more comes if needed."""
        self._allocate(max(rows, MIN_ROWS))
        self._step_buffers += [self._make_step_buffers() for _ in range(max(steps, 1))]
        if steps:
            self.slot(steps * self._num_slots - 1)

    def put(self, asks: Sequence[RowAsk], logits: int, *, token_ids: int = 0, step: int = 0) -> None:
        """Put on the stream, after a step, what is asked of its rows, which lie at an address.

        In a chain, of which this is the n-th ``step`` from 0 on, tokens that are drawn take the places of the greedy
        ones at ``token_ids``; all its steps have the same number of rows.
        """
        rows = len(asks)
        if rows > self._max_rows:
            self._allocate(max(rows, 2 * self._max_rows, MIN_ROWS))
        while len(self._step_buffers) <= step:
            self._step_buffers.append(self._make_step_buffers())
        step_buffers = self._step_buffers[step]
        self.generation += 1
        self._address = logits
        driver = self._driver
        rules, uniforms, tokens, slots = zip(*asks, strict=True)
        if rules != step_buffers.rules:
            step_buffers.set_rules(rules)
        if step_buffers.draws:
            step_buffers.set_params(rows, uniforms, tokens)
            driver.copy_in(step_buffers.at_asks, step_buffers.host_asks, 8 * ASK * rows)
            parts = (step_buffers.at_asks, self._at_tops, self._at_sums)
            self._launch("weigh", (rows, self._blocks), logits, *parts, self.width, self._blocks)
            found = (step_buffers.at_found, self._at_bins, token_ids or self._at_bins)
            self._launch("draw", (rows, 1), logits, *parts, *found, self.width, self._blocks, int(token_ids > 0))
            size = _FOUND_BYTES * rows
            if step_buffers.cuts:
                size += _INLINE_BYTES * rows
                self._launch_cuts(rows, step_buffers)
            driver.copy_out(step_buffers.host_found, step_buffers.at_found, size)
            self.counts.bytes += size
        row_bytes = 4 * self.width
        if slots != step_buffers.slots:
            kept = [self.slot(slot) if slot >= 0 else -1 for slot in slots]
            step_buffers.slots, step_buffers.runs = slots, list(_find_runs(kept, row_bytes))
        for first, count, place in step_buffers.runs:
            driver.copy_rows(place, logits + first * row_bytes, row_bytes, count, row_bytes)
        for i in step_buffers.fetched:
            self._enqueue_row_copy(i, logits + i * row_bytes)
        self.counts.steps += 1

    def _launch_cuts(self, rows: int, step_buffers: RowStepBuffers) -> None:
        places = (rows, self._blocks)
        arguments = (self._address, step_buffers.at_asks, step_buffers.at_found, self._at_bins)
        if step_buffers.spreads:
            self._launch("spread", places, *arguments, self.width)
        ids = step_buffers.at_found + _FOUND_BYTES * rows
        outputs = (
            ids,
            ids + 4 * K_INLINE * rows,
            self._at_candidates,
            self._at_candidates + 4 * K_MAX * self._max_rows,
        )
        self._launch("gather", places, *arguments, *outputs, self.width)

    def collect(self, asks: Sequence[RowAsk], token_ids: Int64Array, *, step: int = 0) -> "DeviceRows":
        """What was found, after the wait; ``token_ids`` [R] are the greedy ones. ``step``: see :meth:`put`."""
        rows, step_buffers, generation = len(asks), self._step_buffers[step], self.generation
        greedy = token_ids.tolist()
        address, pitch = self._address, 4 * self.width
        if not step_buffers.draws:
            found: Iterable[RowFound] = [UNKNOWN] * rows
        else:
            found = map(AS_FOUND, step_buffers.found[: FOUND * rows].reshape(rows, FOUND).tolist())
        made = [
            DeviceRow(self, i, ask, answer if ask.rule.temperature else UNKNOWN, token, address + pitch * i, generation)
            for i, (ask, answer, token) in enumerate(zip(asks, found, greedy, strict=True))
        ]
        if step_buffers.cuts:
            at_inline = step_buffers.host_found + _FOUND_BYTES * rows
            cuts = RowCuts(
                rows,
                K_INLINE,
                step_buffers.host_asks,
                step_buffers.host_found,
                step_buffers.host_kept_masses,
                at_inline,
            )
            for row in made:
                row.cuts = cuts
        return DeviceRows(made)

    def fetch(self, place: int, address: int | None) -> Float32Array:
        """See ``RowSource.fetch``."""
        if address is not None:
            self._enqueue_row_copy(place, address)
            self.wait()
        return self._rows[place].view(np.float32)

    def _enqueue_row_copy(self, place: int, address: int) -> None:
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
        """See ``RowSource.candidates``."""
        host = int(self._candidates.ctypes.data)
        for part in range(2):
            source = self._at_candidates + 4 * K_MAX * (part * self._max_rows + place)
            self._driver.copy_out(host + 4 * K_MAX * part, source, 4 * count)
        self.counts.bytes += 8 * count
        self.wait()
        found = self._candidates.copy()
        return found.view(np.int32)[:count], found.view(np.float32)[K_MAX:][:count]

    def residuals(self, asks: Sequence[ResidualAsk]) -> list[tuple[float, int]]:
        """See ``RowSource.residuals``."""
        count = len(asks)
        queries = (ResidualQuery * count).from_buffer(self._residual_asks.data)
        for i, ask in enumerate(asks):
            queries[i] = ResidualQuery(*ask)
        asked, found = self._at_residual_asks, self._at_residual
        self._driver.copy_in(asked, int(self._residual_asks.ctypes.data), _RESIDUAL_BYTES * count)
        at = (asked, asked + ResidualQuery.target.offset, self._at_sums)
        self._launch("weigh_surplus", (count, self._blocks), *at, self._blocks)
        self._launch("draw_surplus", (count, 1), *at, found, self._blocks)
        self._driver.copy_out(int(self._residual.ctypes.data), found, 16 * count)
        self.counts.bytes += 16 * count
        self.wait()
        numbers = self._residual[: 2 * count].tolist()
        return [(total, int(token)) for total, token in zip(numbers[::2], numbers[1::2], strict=True)]

    def _launch(self, name: str, grid: tuple[int, int], *arguments: int) -> None:
        kernel = self._kernels[name]
        self._driver.launch_kernel(kernel.handle, (*grid, 1), kernel.threads, kernel.shared, arguments)

    def slot(self, slot: int) -> int:
        """See ``RowSource.slot``."""
        group, place = divmod(slot, self._num_slots)
        while group >= len(self._slots):
            self._slots.append(self._driver.allocate(4 * self.width * self._num_slots, "logits of drafts"))
        return self._slots[group] + 4 * place * self.width

    def _allocate(self, rows: int) -> None:
        """Memory for steps of up to so many rows, in place of what there was."""
        self._free()
        blocks = self._blocks
        (
            self._at_tops, self._at_sums, self._at_bins, self._at_candidates, self._at_residual_asks, self._at_residual,
        ) = self._take_memory(
            4 * rows * blocks, 8 * rows * blocks, 8 * rows * BINS, 8 * K_MAX * rows, _RESIDUAL_BYTES * rows, 16 * rows
        )  # fmt: skip
        sizes = (8 * K_MAX, _RESIDUAL_BYTES * rows, 16 * rows)
        self._candidates, self._residual_asks, self._residual = map(self._pin, sizes)
        self._max_rows = rows

    def _make_step_buffers(self) -> RowStepBuffers:
        rows, found = self._max_rows, self._max_rows * (_FOUND_BYTES + _INLINE_BYTES)
        at_asks, at_found = self._take_memory(8 * ASK * rows, found)
        return RowStepBuffers(at_asks, at_found, self._pin(8 * ASK * rows).reshape(rows, ASK), self._pin(found))

    def _take_memory(self, *sizes: int) -> list[int]:
        """Device memory for several things, one after the other."""
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
        self._memory, self._pinned, self._step_buffers, self._max_rows = [], [], [], 0

    def close(self) -> None:
        """Give everything back; no row may be used any more."""
        self._free()
        for address in self._slots:
            self._driver.free(address)
        for memory in self._rows.values():
            self._driver.free_host(memory)
        self._slots, self._rows = [], {}


def _find_runs(addresses: Sequence[int], pitch: int) -> Iterator[tuple[int, int, int]]:
    """Place, length and address of the runs whose addresses lie ``pitch`` apart; below 0 there is none."""
    first = 0
    for i, address in enumerate([*addresses, -1]):
        if i > first and address != addresses[i - 1] + pitch:
            if addresses[first] >= 0:
                yield first, i - first, addresses[first]
            first = i


class DeviceRow(LogitRow):
    """A row that draws where it lies; valid until the next step, or, if it was kept, until its slot is used again."""

    __slots__ = ("_address", "_generation", "_place", "_sampler", "_token_id", "ask", "cut_at", "cuts", "found")

    def __init__(
        self,
        sampler: RowSource,
        place: int,
        ask: RowAsk,
        found: RowFound,
        token_id: int,  # the greedy one, of all V; ``NO_TOKEN`` if the row holds a NaN
        address: int,  # in the step
        generation: int,
    ) -> None:
        self._sampler, self._place, self._address, self._generation = sampler, place, address, generation
        self.ask, self.found, self._token_id = ask, found, token_id
        self.cuts: RowCuts | None = None  # of its step, where it has this place
        self.cut_at = place

    @property
    def token_id(self) -> int:
        """See the base class."""
        return self._token_id

    @property
    def is_flat(self) -> bool:
        """Whether the asked cut leaves so much of it that candidates cost more than the row."""
        return self.found.candidates > max(self._sampler.k_inline, self.ask.rule.width // _SHARE)

    @property
    def is_cut(self) -> bool:
        """Whether the library made the asked cut: what is kept lies in this process's memory."""
        return self.cuts is not None and self.cuts.numbers[self.cut_at][0] > 0

    def is_in_same_memory(self, other: "DeviceRow") -> bool:
        """Whether both are in one memory: a GPU's, or this process's."""
        return type(self._sampler) is type(other._sampler)

    @property
    def address(self) -> int:
        """Where its logits lie."""
        return self._address if self.ask.slot < 0 else self._sampler.slot(self.ask.slot)

    def fetch(self) -> Float32Array:
        """See the base class, in memory that is used again. SpecexportError: it is no longer there."""
        return self.fetch_all()[: self.ask.rule.width or None]

    def fetch_all(self) -> Float32Array:
        """As :meth:`fetch`, with the ids that do not count."""
        is_last, rule = self._generation == self._sampler.generation, self.ask.rule
        if not is_last and self.ask.slot < 0:
            raise SpecexportError("this row of logits was overwritten by a later step.")
        return self._sampler.fetch(self._place, None if rule.fetch and is_last else self.address)

    def candidates(self) -> tuple[Int64Array, Float32Array] | None:
        """Ids, ascending, and logits of all that the asked cut may keep, of a row that is not cut: None of too many."""
        count = int(self.found.candidates)
        if count > K_MAX or self._generation != self._sampler.generation:
            return None
        if (found := self._sampler.candidates(self._place, count)) is None:
            return None
        ids, values = found
        order = ids[:count].argsort()
        return ids[order].astype(np.int64), values[order]

    def residual_ask(self, draft: "DeviceRow", weight: float) -> ResidualAsk:
        """To ask for max(0, weight * softmax of this row - that of ``draft``), at this row's uniform."""
        (rule, found), (other, of_other) = (self.ask.rule, self.found), (draft.ask.rule, draft.found)
        mine = (rule.temperature, rule.width, found.peak, found.total)
        theirs = (other.temperature, other.width, of_other.peak, of_other.total)
        return ResidualAsk(*mine, *theirs, weight, -1, self.ask.uniform, self.address, draft.address)

    def residuals(self, asks: Sequence[ResidualAsk]) -> list[tuple[float, int]]:
        """Sum and token of what was asked of rows of this row's step; waits."""
        return self._sampler.residuals(asks)


class DeviceRows(LogitRows):
    """The rows of logits of a step on a GPU."""

    is_near = False

    def __init__(self, rows: Sequence[DeviceRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> DeviceRow:
        return self._rows[place]

    @cached_property
    def token_ids(self) -> list[int]:
        """See the base class."""
        return [row.token_id for row in self._rows]

    def fetch(self, start: int, stop: int) -> Float32Array:
        """See the base class."""
        return np.stack([row.fetch_all() for row in self._rows[start:stop]])
