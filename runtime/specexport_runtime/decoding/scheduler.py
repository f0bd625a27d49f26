"""Continuous batching: who runs, in which cache row, and how the step's token budget is shared. Knows no model.

Running sequences hold rows 0 … n-1. When one finishes its row is a hole, which the next waiting sequence takes over at
once; holes that nobody takes are closed by moving the last row.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from specexport_runtime.errors import SpecexportError
from specexport_runtime.sequences.sequence import NO_ROW, Sequence


class Scheduler:
    """First come, first served, over a fixed number of cache rows.

    Args:
        num_rows: cache rows: sequences that run at a time.
        max_num_batched_tokens: most tokens of one step. Sequences that are decoding always get theirs; prompts share
            what is left, the oldest first.
        min_prefill_tokens: the oldest prompt gets this many even if nothing is left, so that it cannot starve.
        min_first_chunk: the first step of a prompt reads this many, or all of it: the engine's numbers of its first
            tokens would depend on where it is cut.

    Attributes:
        waiting: sequences without a row, in order of arrival.
        rows: the sequence of each row in use; None is a hole.
    """

    def __init__(
        self, num_rows: int, *, max_num_batched_tokens: int, min_prefill_tokens: int = 16, min_first_chunk: int = 1
    ) -> None:
        self.num_rows = num_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.min_prefill_tokens = min_prefill_tokens
        self.min_first_chunk = min_first_chunk
        self.waiting: deque[Sequence] = deque()
        self.rows: list[Sequence | None] = []
        self._arrivals: dict[int, Sequence] = {}

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row, in row order."""
        return [seq for seq in self.rows if seq is not None]

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting) or any(self.rows)

    @property
    def can_admit(self) -> bool:
        """Whether somebody waits and a row is free."""
        return bool(self.waiting) and self._free_row() != NO_ROW

    def place(
        self,
        busy_tokens: int,
        pending: Callable[[Sequence], int],
        move_row: Callable[[int, int], None],
        begin: Callable[[Sequence], None] = lambda _: None,
        is_early: Callable[[Sequence], bool] = lambda _: False,
        fits: Callable[[Sequence], bool] = lambda _: True,
    ) -> None:
        """Admit what fits, then close the holes that are left.

        A sequence is admitted when a row is free and the step still has budget for its prompt.

        Args:
            busy_tokens: tokens that decoding sequences may take in this step.
            pending: tokens of a sequence that the target has not seen.
            move_row: moves a cache row: source, destination.
            begin: told of each sequence that was admitted.
            is_early: whether the next sequence had better wait, and with it those behind it.
            fits: whether there is memory for the next sequence; if not, it waits, and with it those behind it.
        """
        if self.waiting:
            left = self.max_num_batched_tokens - busy_tokens - sum(self._prompt_tokens(pending))
            while self.waiting and (left > 0 or not self._prompt_tokens(pending)):
                row = self._free_row()
                if row == NO_ROW or is_early(self.waiting[0]) or not fits(self.waiting[0]):
                    break
                seq = self.waiting.popleft()
                self._take(seq, row)
                begin(seq)
                left -= pending(seq)
        while self.rows and None in self.rows:
            last = self.rows[-1]
            if last is not None:
                hole = self.rows.index(None)
                move_row(last.row, hole)  # while it is known to run where it is
                last.row = hole
                self.rows[hole] = last
            self.rows.pop()

    def share(self, busy_tokens: int, pending: Callable[[Sequence], int], max_chunk: int) -> dict[int, int]:
        """Prompt tokens of each row in this step, the oldest prompts first.

        Args:
            busy_tokens: tokens that decoding sequences take in this step.
            pending: tokens of a sequence that the target has not seen.
            max_chunk: most prompt tokens of one row.

        Returns:
            row to number of tokens, for rows that get any.
        """
        left = max(self.max_num_batched_tokens - busy_tokens, self.min_prefill_tokens)
        chunks: dict[int, int] = {}
        for seq in self._arrivals.values():
            if seq.num_generated:
                continue
            waits = pending(seq)
            # Also where a kept prefix is gone on from: what was read alike must go on alike.
            least = min(waits, max(self.min_first_chunk - (len(seq.tokens) - waits), 1), max_chunk)
            chunk = min(waits, left, max_chunk)
            if chunk < least:
                if chunks:  # a later step has more room; only the oldest prompt must not wait for that
                    break
                chunk = least
            chunks[seq.row] = chunk
            left -= chunk
        return chunks

    def retire(self, seq: Sequence) -> None:
        """A sequence gives its row back, or its place in the queue."""
        if seq.row == NO_ROW:
            self.waiting.remove(seq)
            return
        self.rows[seq.row] = None
        seq.row = NO_ROW
        del self._arrivals[id(seq)]

    def check(self, kv_lens: Mapping[int, int] | Seq[int]) -> None:
        """Assert the invariants between rounds.

        Args:
            kv_lens: committed cache entries of every row.

        Raises:
            SpecexportError: a row number or a cache length is wrong.
        """
        if len(self.rows) > self.num_rows or set(self._arrivals) != {id(seq) for seq in self.running}:
            raise SpecexportError(f"{len(self.running)} sequences run in {len(self.rows)} of {self.num_rows} rows.")
        for row in range(self.num_rows):
            seq = self.rows[row] if row < len(self.rows) else None
            if seq is None and kv_lens[row]:
                raise SpecexportError(f"row {row} has no sequence but {kv_lens[row]} committed entries.")
            if seq is not None and (seq.row != row or kv_lens[row] >= len(seq.tokens)):
                raise SpecexportError(
                    f"row {row} holds sequence {seq.index} (row {seq.row}) with kv_len {kv_lens[row]} "
                    f"for {len(seq.tokens)} tokens."
                )

    def _prompt_tokens(self, pending: Callable[[Sequence], int]) -> list[int]:
        return [pending(seq) for seq in self._arrivals.values() if not seq.num_generated]

    def _free_row(self) -> int:
        if None in self.rows:
            return self.rows.index(None)
        return len(self.rows) if len(self.rows) < self.num_rows else NO_ROW

    def _take(self, seq: Sequence, row: int) -> None:
        if row == len(self.rows):
            self.rows.append(seq)
        else:
            self.rows[row] = seq
        seq.row = row
        seq.stats.start_time = time.perf_counter()
        self._arrivals[id(seq)] = seq
