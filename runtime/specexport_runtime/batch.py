"""The packed step: the one place that turns per-sequence work into the flat arrays of the graph contract.

::

    work:       row 0: a b c      row 1: (none)     row 2: d e
    input_ids:  a b c d e                                        T = 5, B = 3, Q = 3
    cu:         0     3 3   5
    tile:       [a b c] [. . .] [d e .]                          slot (b, j) = b*Q + j
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from specexport_runtime.abi import StepShape
from specexport_runtime.executors.base import Executor, Float32Array, StepBuffers
from specexport_runtime.kv import KvArena


class RowWork(NamedTuple):
    """New tokens of one cache row in a step.

    Attributes:
        tokens: new tokens, in order; empty for a row that sits the step out.
        num_logits: how many of the last tokens need logits.
    """

    tokens: Seq[int]
    num_logits: int


IDLE = RowWork((), 0)
MAX_FILLED = 512


def step_shape(first_row: int, work: Seq[RowWork]) -> StepShape:
    """Sizes of the packed step for ``work`` on rows ``first_row``, ``first_row + 1``, and so on."""
    if len(work) == 1:  # the common case, kept free of generator overhead
        count = len(work[0].tokens)
        return StepShape(first_row, 1, count, count, work[0].num_logits)
    counts = [len(row.tokens) for row in work]
    return StepShape(first_row, len(work), sum(counts), max(counts), sum(row.num_logits for row in work))


def fill_index_inputs(buffers: StepBuffers, counts: Seq[int], num_logits: Seq[int]) -> None:
    """Fill the inputs that depend on the counts only: cu_new_tokens, pad_index, unpad_index, logit_rows.

    Args:
        buffers: host arrays of the step.
        counts: new tokens of each row.
        num_logits: trailing tokens of each row that need logits.
    """
    tile_width = buffers.pad_index.shape[2]
    start = logit = 0
    buffers.cu_new_tokens[0] = 0
    for row, (count, wanted) in enumerate(zip(counts, num_logits, strict=True)):
        end = start + count
        slots = np.arange(start, end)
        buffers.pad_index[row, 0, :count] = slots
        # Padding slots may hold any token: what attention computes for them is never read.
        buffers.pad_index[row, 0, count:] = min(start, max(sum(counts) - 1, 0))
        buffers.unpad_index[start:end] = slots - start + row * tile_width
        buffers.cu_new_tokens[row + 1] = end
        buffers.logit_rows[logit : logit + wanted] = np.arange(end - wanted, end)
        start, logit = end, logit + wanted


class ModelRunner:
    """One model: an executor, its KV bookkeeping, and the packing of steps for it.

    Args:
        executor: the engine.
        max_chunk: most tokens of one prefill step.
    """

    def __init__(self, executor: Executor, *, max_chunk: int = 512) -> None:
        self.executor = executor
        self.kv = KvArena(executor.num_rows, executor.kv_capacity)
        self.max_chunk = max_chunk
        self._filled: dict[StepShape, tuple[StepBuffers, tuple[tuple[int, int], ...]]] = {}
        self._arange = np.arange(executor.kv_capacity + 1, dtype=np.int64)

    def step(self, first_row: int, work: Seq[RowWork]) -> Float32Array:
        """Run one packed step. Entries are written after each row's committed ones and are not committed.

        Args:
            first_row: cache row of ``work[0]``.
            work: new tokens of consecutive rows; at least one token and one logit row in all.

        Returns:
            logits [R, V], float32: the wanted rows of each sequence, in order; overwritten by the next step.

        Raises:
            SpecexportError: a row cannot hold the new tokens.
        """
        shape = step_shape(first_row, work)
        for offset in range(len(work)):
            # Padding slots are written too (and never committed), so every row needs room for Q entries.
            self.kv.write(first_row + offset, shape.max_new_tokens)
        buffers = self.executor.prepare(shape)
        counts = tuple((len(row.tokens), row.num_logits) for row in work)
        filled = self._filled.get(shape)
        if filled is None or filled[0] is not buffers or filled[1] != counts:
            fill_index_inputs(buffers, [count for count, _ in counts], [wanted for _, wanted in counts])
            if len(self._filled) >= MAX_FILLED:
                self._filled.clear()
            self._filled[shape] = (buffers, counts)
        start = 0
        for offset, row in enumerate(work):
            kv_len = self.kv.kv_len(first_row + offset)
            end = start + len(row.tokens)
            buffers.input_ids[start:end] = row.tokens
            buffers.positions[start:end] = self._arange[kv_len : kv_len + end - start]
            buffers.kv_lens[offset, 0] = kv_len
            buffers.row_totals[offset, 0] = kv_len + shape.max_new_tokens
            start = end
        return self.executor.execute()

    def prefill(self, row: int, tokens: Seq[int]) -> None:
        """Feed ``tokens`` to ``row`` in chunks and commit them; their logits are not wanted."""
        for start in range(0, len(tokens), self.max_chunk):
            chunk = tokens[start : start + self.max_chunk]
            self.step(row, [RowWork(chunk, 1)])
            self.kv.commit(row, self.kv.kv_len(row) + len(chunk))

    def move_row(self, source: int, destination: int) -> None:
        """Move a sequence's cache to another row."""
        self.executor.move_row(source, destination, self.kv.kv_len(source))
        self.kv.move(source, destination)

    def release_row(self, row: int) -> None:
        """Forget the sequence in ``row``."""
        self.kv.release(row)
