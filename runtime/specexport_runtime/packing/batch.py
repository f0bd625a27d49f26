"""The packed step: the one place that turns per-sequence work into the flat arrays of the graph contract.

::

    work:       row 0: a b c      row 1: (none)     row 2: d e
    input_ids:  a b c d e                                        T = 5, B = 3, Q = 3
    cu:         0     3 3   5
    tile:       [a b c] [. . .] [d e .]                          slot (b, j) = b*Q + j

An idle row names one token of another row: attention needs something to compute, the entry it writes is not committed.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.base import (
    MAX_CHUNK,
    RECEDE_EVERY,
    WAY_BACK,
    Executor,
    Float32Array,
    Int64Array,
    StepBuffers,
    StepOutput,
    Want,
)
from specexport_runtime.executors.logit_rows import LogitRows
from specexport_runtime.executors.row_kernels import NOTHING, RowAsk
from specexport_runtime.packing.kv import KvArena, PaddedKvArena, StateArena


class RowWork(NamedTuple):
    """New tokens of one cache row in a step."""

    tokens: Sequence[int]  # in order; empty for a row that sits the step out
    num_logits: int  # how many of the last tokens need logits
    features: Float32Array | None = None  # of a draft head, [n, E]: comes with the tokens; None gives zeros
    # How many of the row's last tokens after this step are drafts: they may not enter a state. Drafts of earlier steps
    # count too, until they are verified.
    drafts: int = 0
    adapter: int | None = None  # the tokens' own, from 1; 0 for none, None for the executor's default
    # The step may let tokens into a state, all but ``drafts``. False where some layers are off: nothing may, for the
    # states of those layers would lack it, and the states of the others would have been given other inputs.
    settles: bool = True
    asks: Sequence[RowAsk] = ()  # of its rows of logits, in order; those without are asked nothing
    # Of the row's last tokens, how many places before each its parent stands; the others follow each other.
    parents: Sequence[int] = ()


class RowCopy(NamedTuple):
    """What a cache row of one model had."""

    entries: int
    floor: int  # see ``Executor.recedes``
    state_len: int  # tokens that its state has
    arrays: list[npt.NDArray[Any]]  # as ``Executor.row_views`` gives them

    @property
    def min_reusable_len(self) -> int:
        """Tokens that another text must share to go on from it."""
        return max(self.floor, self.state_len)


IDLE = RowWork((), 0)
PADDING_TOKEN = 0  # an input token that is never committed may be any
MAX_FILLED = 512
SPAN_BUCKET = 64  # kv_span grows in steps of this, so that bindings of padded graphs are used again


def step_shape(first_row: int, work: Sequence[RowWork], kv_span: int = 0) -> StepShape:
    """Sizes of the packed step for ``work`` on rows ``first_row``, ``first_row + 1``, and so on."""
    if len(work) == 1:  # the common case, kept free of generator overhead
        count = len(work[0].tokens)
        return StepShape(first_row, 1, count, count, work[0].num_logits, kv_span)
    counts = [len(row.tokens) for row in work]
    return StepShape(first_row, len(work), sum(counts), max(counts), sum(row.num_logits for row in work), kv_span)


def pad_work(work: Sequence[RowWork]) -> list[RowWork]:
    """Every row padded to the longest, as the padded method feeds it: padding tokens get logits like any other."""
    width = max(len(row.tokens) for row in work)
    lacking = [width - len(row.tokens) for row in work]
    return [
        RowWork([*row.tokens, *[PADDING_TOKEN] * count], row.num_logits + count, adapter=row.adapter)
        for row, count in zip(work, lacking, strict=True)
    ]


def fill_index_inputs(buffers: StepBuffers, counts: Sequence[int], num_logits: Sequence[int]) -> None:
    """Fill the inputs that depend only on the new tokens of each row and its last ``num_logits`` that need logits."""
    num_rows, _, width = buffers.pad_index.shape
    given, wanted = np.asarray(counts), np.asarray(num_logits)
    buffers.cu_new_tokens[0] = 0
    np.cumsum(given, out=buffers.cu_new_tokens[1:])
    cu = buffers.cu_new_tokens.astype(np.int64)
    num_tokens = int(cu[-1])
    np.minimum(cu[:-1], num_tokens - 1, out=buffers.row_starts[:, 0])
    np.maximum(cu[1:], buffers.row_starts[:, 0] + 1, out=buffers.row_ends[:, 0])
    # Padding slots may hold any token: what attention computes for them is never read.
    np.minimum(buffers.row_starts + np.arange(width), buffers.row_ends - 1, out=buffers.pad_index[:, 0])
    np.add(np.arange(num_tokens), np.repeat(np.arange(num_rows) * width - cu[:-1], given), out=buffers.unpad_index)
    firsts = np.cumsum(wanted) - wanted
    np.add(np.arange(firsts[-1] + wanted[-1]), np.repeat(cu[1:] - wanted - firsts, wanted), out=buffers.logit_rows)


def _fill_rows(buffer: Float32Array | Int64Array, work: Sequence[RowWork], values: Iterable[Any]) -> None:
    """Write a value of each row to all its tokens."""
    start = 0
    for row, value in zip(work, values, strict=True):
        buffer[start : start + len(row.tokens)] = value
        start += len(row.tokens)


def _restore_parents(work: Sequence[RowWork], buffers: StepBuffers) -> None:
    """After a step with trees each token's parent is the one before it again."""
    if buffers.parents is not None and any(row.parents for row in work):
        buffers.parents.fill(1)


def _fill_parents(buffers: StepBuffers, work: Sequence[RowWork]) -> None:
    """Parents of tokens that are no chain, and their positions."""
    if buffers.parents is None:
        raise SpecexportError("this engine takes no trees.")
    end = 0
    for row in work:
        end += len(row.tokens)
        for token, distance in enumerate(row.parents, start=end - len(row.parents)):
            buffers.parents[token] = distance  # it is in the step: the newest token of the text at the least
            buffers.positions[token] = buffers.positions[token - distance] + 1


def _drop_greedy_asks(asks: Sequence[RowAsk]) -> Sequence[RowAsk]:
    """What is asked of rows; nothing where the greedy tokens will do."""
    return asks if any(ask is not NOTHING for ask in asks) else ()


class ModelRunner:
    """One model: an executor, its KV bookkeeping, and the packing of steps for it."""

    def __init__(
        self,
        executor: Executor,
        *,
        max_chunk: int = MAX_CHUNK,  # most tokens of one prefill step; the executor's limit holds too
        unpad_kv: bool = True,  # False advances all rows of a step together: the executor runs a padded-KV graph
        unpad_input: bool = True,  # False pads every row of a step to the longest
        kv: KvArena | None = None,  # None makes one
        stretch: float = 1.0,  # most cache entries for each token of the target: more in another vocabulary
    ) -> None:
        self.executor, self.stretch = executor, stretch
        # Layers keep a state: steps have to say which of their tokens are drafts.
        self.has_states = executor.num_pending > 0
        if kv is None and self.has_states:
            if not (unpad_kv and unpad_input):
                raise InvalidRequestError(
                    "this model keeps states, which padding would enter.",
                    "leave out --no-unpad-kv and --no-unpad-input.",
                )
            kv = StateArena(executor.num_rows, executor.kv_capacity, executor.num_pending)
        arena = KvArena if unpad_kv else PaddedKvArena
        self.kv: KvArena = arena(executor.num_rows, executor.kv_capacity) if kv is None else kv
        self.max_chunk = min(max_chunk, executor.max_num_tokens or max_chunk)
        self.unpad_input = unpad_input
        self.logit_starts: list[int] = []  # of the last step: where each row's logits begin
        self.step_padding = 0  # padding tokens that were fed in the last step
        self.prefill_seconds = 0.0  # spent inside the engine by :meth:`prefill`
        self._filled: dict[StepShape, tuple[StepBuffers, tuple[tuple[int, int], ...]]] = {}
        self._arange = np.arange(executor.kv_capacity + 1, dtype=np.int64)
        # Whether row memory that is of no use can go back to the system.
        self.gives_back = executor.gives_back and unpad_kv and not executor.borrows_cache
        self._recedes = executor.recedes and unpad_kv
        # Of the text in each row's memory: a sequence can go on from it only after so many tokens.
        self._floors, self._state_lens = [0] * executor.num_rows, [0] * executor.num_rows

    @property
    def unpad_kv(self) -> bool:
        """Whether each row has its own write position."""
        return not isinstance(self.kv, PaddedKvArena)

    def min_reusable_len(self, row: int) -> int:
        """Tokens of the text in a row's memory that another must share to go on from it: a state cannot go back."""
        return max(self._floors[row], self._state_lens[row])

    def resume_row(self, row: int, count: int) -> None:
        """Go on in an empty row after ``count`` tokens of the text in its memory, :meth:`min_reusable_len` or more."""
        self.kv.restore(row, count, self._state_lens[row])

    def step_rows(self, first_row: int, work: Sequence[RowWork]) -> LogitRows:
        """As :meth:`step`, for what ``work`` asks of its rows of logits."""
        buffers = self._pack(first_row, work)
        asks: list[RowAsk] = []
        if any(row.asks for row in work):
            asks = [NOTHING] * len(buffers.logit_rows)
            for start, row in zip(self.logit_starts, work, strict=True):
                asks[start : start + len(row.asks)] = row.asks
        try:
            return self.executor.execute_rows(_drop_greedy_asks(asks))
        finally:
            _restore_parents(work, buffers)

    def step(self, first_row: int, work: Sequence[RowWork], want: Want = "logits") -> StepOutput:
        """Run one packed step of consecutive rows, with at least one token and one logit row in all.

        Entries are written after each row's committed ones and are not committed. Gives logits float32 [R, V] or token
        ids int64 [R], those of ``work[i]`` from ``logit_starts[i]`` on; the next step overwrites them.
        SpecexportError if a row cannot hold the new tokens.
        """
        buffers = self._pack(first_row, work)
        try:
            return self.executor.execute(want)
        finally:
            _restore_parents(work, buffers)

    @property
    def chains(self) -> bool:
        """Whether steps can follow each other without a look at what they give."""
        return self.executor.chains and self.unpad_input and not self.has_states

    def chain(self, first_row: int, work: Sequence[RowWork], asks: Sequence[Sequence[RowAsk]]) -> list[LogitRows]:
        """Run a step for each of ``asks`` with one wait: one with ``work``, then each with the ids of the one before.

        ``work`` wants the logits of the last token of each row that is not idle, and ``asks`` are of these rows, or
        empty. Entries of all that was fed are committed. Gives the rows of each step, until the next step; errors as
        :meth:`step`.
        """
        count = len(asks)
        buffers = self._pack(first_row, work)
        self.executor.enqueue(fed=False, asks=_drop_greedy_asks(asks[0]))
        active = [row for row, given in enumerate(work, start=first_row) if given.tokens]
        for row in active:
            self.kv.commit(row, self.kv.kv_len(row) + len(work[row - first_row].tokens))
        if count > 1:
            work = [given._replace(tokens=(PADDING_TOKEN,)) if given.tokens else given for given in work]
            buffers = self._pack(first_row, work)
            self.kv.write(first_row, [count - 1 if given.tokens else 1 for given in work])
            self.executor.enqueue(fed=True, asks=_drop_greedy_asks(asks[1]))
        grown = np.array([[len(given.tokens)] for given in work], np.int32)
        for asked in asks[2:]:  # the same step, one entry further
            for lengths in (buffers.kv_lens, buffers.row_totals):
                np.add(lengths, grown, out=lengths)
            np.add(buffers.positions, 1, out=buffers.positions)
            self.executor.enqueue(fed=True, asks=_drop_greedy_asks(asked))
        for row in active if count > 1 else ():
            self.kv.commit(row, self.kv.kv_len(row) + count - 1)
        return self.executor.collect()

    def _pack(self, first_row: int, work: Sequence[RowWork]) -> StepBuffers:
        """Prepare a step and fill its inputs."""
        self.step_padding = 0
        if not self.unpad_input and len(work) > 1:
            given = sum(len(row.tokens) for row in work)
            work = pad_work(work)
            self.step_padding = sum(len(row.tokens) for row in work) - given
        counts = tuple([(len(row.tokens), row.num_logits) for row in work])
        needed = [count or 1 for count, _ in counts]
        span = self._make_room(first_row, needed)
        if self._recedes or self.has_states:
            self._begin_or_recede(first_row, work)
        states = self._step_states(first_row, work)
        self.kv.write(first_row, needed)
        shape = step_shape(first_row, work, span)
        buffers = self.executor.prepare(shape)
        if states is not None and buffers.state_steps is not None:
            buffers.state_steps[:] = states
        filled = self._filled.get(shape)
        if filled is None or filled[0] is not buffers or filled[1] != counts:
            fill_index_inputs(buffers, [count for count, _ in counts], [wanted for _, wanted in counts])
            if len(self._filled) >= MAX_FILLED:
                self._filled.clear()
            self._filled[shape] = (buffers, counts)
        self._fill_tokens(buffers, first_row, work, needed)
        self.logit_starts = [0] * len(work)
        for i in range(1, len(work)):
            self.logit_starts[i] = self.logit_starts[i - 1] + counts[i - 1][1]
        return buffers

    def _step_states(self, first_row: int, work: Sequence[RowWork]) -> Int64Array | None:
        """What the step does with states; None for a model without."""
        if not isinstance(self.kv, StateArena):
            return None
        counts = [(len(given.tokens), given.drafts if given.settles else None) for given in work]
        steps = self.kv.step(first_row, counts)
        for row in range(first_row, first_row + len(work)):
            self._state_lens[row] = self.kv.state_len(row)
        return steps

    def _begin_or_recede(self, first_row: int, work: Sequence[RowWork]) -> None:
        """A row that begins has an empty state; one that is long forgets what no window will see again."""
        for row, given in enumerate(work, start=first_row):
            if not given.tokens:
                continue
            known = self.kv.kv_len(row)
            if not known:
                self._floors[row] = self._state_lens[row] = 0
                self.executor.clear_row(row)
            elif self._recedes and known - WAY_BACK >= self._floors[row] + RECEDE_EVERY:
                self.executor.recede(row, known - WAY_BACK)
                self._floors[row] = known - WAY_BACK

    def _make_room(self, first_row: int, needed: Sequence[int]) -> int:
        """In the padded method, pad rows to one length, without old padding if full; the kv_span, 0 if unpadded."""
        if not isinstance(self.kv, PaddedKvArena):
            return 0
        self.kv.align(first_row, len(needed))
        if not self.kv.fits(first_row, needed):
            for row in range(first_row, first_row + len(needed)):
                self.executor.move_entries(row, self.kv.squeeze(row))
            self.kv.align(first_row, len(needed))
        end = max(self.kv.entries(first_row + i) + count for i, count in enumerate(needed))
        return min(-(-end // SPAN_BUCKET) * SPAN_BUCKET, self.kv.capacity)

    def _fill_tokens(
        self, buffers: StepBuffers, first_row: int, work: Sequence[RowWork], needed: Sequence[int]
    ) -> None:
        if len(work) == 1:
            kv_len = self.kv.kv_len(first_row)
            buffers.input_ids[:] = work[0].tokens
            buffers.positions[:] = self._arange[kv_len : kv_len + len(work[0].tokens)]
        else:
            buffers.input_ids[:] = list(chain.from_iterable(row.tokens for row in work))
            kv_lens = [self.kv.kv_len(first_row + i) for i in range(len(work))]
            shifts = np.asarray(kv_lens) - buffers.cu_new_tokens[:-1]
            counts = [len(row.tokens) for row in work]
            if len(self._arange) < len(buffers.positions):  # many short rows make a step longer than any row
                self._arange = np.arange(len(buffers.positions), dtype=np.int64)
            np.add(self._arange[: len(buffers.positions)], np.repeat(shifts, counts), out=buffers.positions)
        if any(row.parents for row in work):
            _fill_parents(buffers, work)
        if buffers.token_features is not None:
            features = (0.0 if row.features is None else row.features for row in work)
            _fill_rows(buffers.token_features, work, features)
        if buffers.adapter_ids is not None:
            default = self.executor.default_adapter
            _fill_rows(buffers.adapter_ids, work, (default if row.adapter is None else row.adapter for row in work))
        buffers.kv_lens[:, 0] = [self.kv.entries(first_row + i) for i in range(len(work))]
        buffers.row_totals[:, 0] = buffers.kv_lens[:, 0] + needed
        if buffers.kv_positions is not None and isinstance(self.kv, PaddedKvArena):
            span = buffers.kv_positions.shape[2]
            buffers.kv_positions[:, 0] = self.kv.kv_positions[first_row : first_row + len(work), :span]

    def prefill(self, row: int, tokens: Sequence[int], features: Float32Array | None = None) -> None:
        """Feed ``tokens`` to ``row`` in chunks and commit them; their logits are not wanted."""
        before = self.executor.engine_seconds
        for start in range(0, len(tokens), self.max_chunk):
            chunk = tokens[start : start + self.max_chunk]
            own = None if features is None else features[start : start + self.max_chunk]
            self.step(row, [RowWork(chunk, 1, own)], "token_ids")
            self.kv.commit(row, self.kv.kv_len(row) + len(chunk))
        self.prefill_seconds += self.executor.engine_seconds - before

    def move_row(self, source: int, destination: int) -> None:
        """Move a sequence's cache to another row."""
        count = self.kv.entries(source)
        if self.gives_back:
            self.swap_rows(source, destination, (count, 0))
        else:
            if self._recedes:
                self.executor.copy_row(source, destination, count, self._floors[source])
            else:
                self.executor.move_row(source, destination, count)
            self.kv.mark_written(destination, count)
            self._note_copy(source, destination)
        self.kv.move(source, destination)

    def copy_row(self, source: int, destination: int, count: int) -> None:
        """Copy a row's first ``count`` entries to another, no length changes; SpecexportError if it cannot copy."""
        if count and source != destination:
            self.executor.copy_row(source, destination, count, self._floors[source])
            self.kv.mark_written(destination, count)
            self._note_copy(source, destination)

    def take_copy(self, row: int, count: int) -> RowCopy:
        """Copy a row's first ``count`` entries out of the cache; any thread, if nothing writes to the row."""
        floor, state_len = self._floors[row], self._state_lens[row]
        arrays = [view.copy() for view in self.executor.row_views(row, count, floor)]
        return RowCopy(count, floor, state_len, arrays)

    def put_copy(self, row: int, copy: RowCopy, count: int) -> None:
        """Put the first ``count`` entries of a copy into a row that nobody uses; no length changes."""
        for view, array in zip(self.executor.row_views(row, count, copy.floor), copy.arrays, strict=True):
            view[:] = array[tuple(map(slice, view.shape))]
        self.kv.mark_written(row, count)
        self._floors[row], self._state_lens[row] = copy.floor, copy.state_len
        if self._recedes:
            self.executor.recede(row, copy.floor)

    def _note_copy(self, source: int, destination: int) -> None:
        for each in (self._floors, self._state_lens):
            each[destination] = each[source]

    def swap_rows(self, one: int, other: int, counts: tuple[int, int]) -> None:
        """Exchange the memory of two rows, ``counts`` entries of each, no lengths; errors as :meth:`copy_row`."""
        if any(counts):
            self.executor.swap_rows(one, other, counts, (self._floors[one], self._floors[other]))
            for each in (self._floors, self._state_lens):
                each[one], each[other] = each[other], each[one]
            for row, count in zip((one, other), counts[::-1], strict=True):
                self.kv.mark_written(row, count)
                if self.gives_back:
                    self.kv.mark_released(row, count)

    def keep_path(self, row: int, kv_len: int, places: Sequence[int]) -> int:
        """Commit ``kv_len`` entries, and those of a path at ascending ``places`` after; how many were moved."""
        still = next((i for i, place in enumerate(places) if place != i), len(places))
        if still < len(places):
            entries = np.array(places[still:], np.int64) + kv_len
            self.executor.move_entries(row, entries, kv_len + still)
        self.kv.commit(row, kv_len + len(places))
        return len(places) - still

    def row_bytes(self, entries: int) -> int:
        """Bytes of memory that the first ``entries`` of a row take; 0 where that is not known."""
        return self.executor.row_bytes(entries)

    def release_pages(self, row: int, kept: int) -> None:
        """Give the memory of all but the first ``kept`` entries of a row back to the system, where that can be."""
        if self.gives_back and self.kv.touched(row) > kept:
            if self.row_bytes(self.kv.touched(row)) > self.row_bytes(kept):
                self.executor.release_pages(row, kept)
            self.kv.mark_released(row, kept)

    def forget_row(self, row: int) -> None:
        """Free ``row``; its memory stays as it is."""
        self.kv.release(row)

    def release_row(self, row: int) -> None:
        """Forget the sequence in ``row``."""
        if self.kv.entries(row):
            self.executor.clear_row(row)
        self.kv.release(row)

    def reset(self) -> None:
        """Forget every row."""
        for row in range(self.kv.num_rows):
            self.release_row(row)
