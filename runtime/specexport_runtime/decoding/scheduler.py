"""Continuous batching: who runs, in which cache row, and how the step's token budget is shared. Knows no model.

Running sequences hold rows 0 … n-1. When one finishes its row is a hole, which the next waiting sequence takes over at
once; other holes are closed by moving the last row. Who is next says ``queue``, who gives way ``pausing``, and how
prompts share a step ``sharing``.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.pausing import whom_to_pause
from specexport_runtime.decoding.queue import WaitingQueue
from specexport_runtime.decoding.sharing import Reading, share_tokens
from specexport_runtime.errors import SpecexportError
from specexport_runtime.sequences.sequence import NO_ROW, Sequence

REREAD_CHUNK = 32
"""Tokens that a paused sequence reads again in a step, at most, since all others wait for the step; no more than
``min_prefill_tokens`` where one of them waits for its first token."""
Pending = Callable[[Sequence], int]
"""Tokens of a sequence that the target has not seen."""


class Scheduler:
    """Rows for sequences that are next, and tokens for sequences that hold a row."""

    def __init__(
        self,
        num_rows: int,
        *,
        max_num_batched_tokens: int,  # of one step; sequences that decode always get theirs, prompts share what is left
        min_prefill_tokens: int = 16,  # prompts get these even if nothing is left, so that they cannot starve
        pace: Pace | None = None,
        can_resume: Callable[[Sequence], bool] = lambda _: True,  # whether a sequence can go on when it was paused
    ) -> None:
        self.num_rows = num_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.min_prefill_tokens = min_prefill_tokens
        self.waiting = WaitingQueue()
        self.rows: list[Sequence | None] = []  # None is a hole
        self._pace = pace or Pace()
        self._can_resume = can_resume
        self._arrivals: dict[int, Sequence] = {}

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row, in row order."""
        return [seq for seq in self.rows if seq is not None]

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting) or any(self.rows)

    def can_admit(self, pending: Pending) -> bool:
        """Whether somebody waits, and a row is free or may be made free."""
        return bool(self.waiting) and (self._free_row() != NO_ROW or self._victim(None, pending) is not None)

    def place(
        self,
        busy_tokens: int,  # that decoding sequences may take in this step
        pending: Pending,
        move_row: Callable[[int, int], None],  # source, destination
        begin: Callable[[Sequence], None] = lambda _: None,  # hears of each sequence that was admitted
        is_early: Callable[[Sequence], bool] = lambda _: False,  # it had better wait, and its owner's behind it
        fits: Callable[[Sequence], bool] = lambda _: True,  # if there is no memory for it, it waits, and all behind it
        pause: Callable[[Sequence], None] = lambda _: None,  # hears of each sequence that is about to lose its row
    ) -> None:
        """Admit what fits, then close the holes that are left.

        A sequence is admitted when a row is free, or can be made free, and the step still has budget for its prompt.
        """
        passed: set[str] = set()
        while (seq := self.waiting.next(self._held(), passed)) is not None:
            if not self._has_budget(seq, busy_tokens, pending):
                passed.add(seq.owner)
                continue
            row, victim = self._free_row(), None
            if row == NO_ROW:
                victim = self._victim(seq, pending)
                if victim is None:
                    break
            if is_early(seq):
                passed.add(seq.owner)
                continue
            if not fits(seq):
                break
            if victim is not None:
                row = victim.row
                pause(victim)
                self._leave(victim)
                self.waiting.put_back(victim)
            self.waiting.take(seq)
            self._take(seq, row)
            begin(seq)
        while self.rows and None in self.rows:
            last = self.rows[-1]
            if last is not None:
                hole = self.rows.index(None)
                move_row(last.row, hole)  # while it is known to run where it is
                last.row = hole
                self.rows[hole] = last
            self.rows.pop()

    def share(self, busy_tokens: int, pending: Pending, max_chunk: int) -> dict[int, int]:
        """Prompt tokens of each row in this step, for rows that get any, the oldest first; see ``sharing``.

        ``busy_tokens`` are taken by sequences that decode; ``max_chunk`` is the most of one row.
        """
        reads = self._reads()
        if not reads:
            return {}
        is_awaited = any(not seq.reads_again for seq in reads)
        again = min(self.min_prefill_tokens if is_awaited else REREAD_CHUNK, max_chunk)
        readings = [self._reading(seq, pending(seq), again if seq.reads_again else max_chunk) for seq in reads]
        left = self._pace.most(self.max_num_batched_tokens - busy_tokens, len(self._arrivals) - len(reads))
        return share_tokens(readings, max(left, self.min_prefill_tokens))

    def _reading(self, seq: Sequence, pending: int, wanted: int) -> Reading:
        """What a sequence has to read: up to ``wanted`` tokens now."""
        unread = pending - seq.reads_again
        return Reading(seq, min(unread, wanted), unread, self._pace.is_late(seq, unread))

    def retire(self, seq: Sequence) -> None:
        """A sequence gives its row back, or its place in the queue."""
        if seq.row == NO_ROW:
            self.waiting.remove(seq)
            return
        self._leave(seq)

    def check(self, kv_lens: Mapping[int, int] | Seq[int]) -> None:
        """Assert the invariants between rounds; ``kv_lens``: committed cache entries of every row.

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

    def _reads(self) -> list[Sequence]:
        """Those that read their prompt, or their text again, the oldest first."""
        return [seq for seq in self._arrivals.values() if not seq.is_decoding]

    def _held(self) -> Mapping[str, int]:
        """Rows that each owner holds."""
        return Counter(seq.owner for seq in self._arrivals.values())

    def _has_budget(self, seq: Sequence, busy_tokens: int, pending: Pending) -> bool:
        """Whether a sequence would get tokens now: others read before it, but for owners with whom it shares."""
        before = [
            pending(each)
            for each in self._reads()
            if each.priority < seq.priority or (each.priority == seq.priority and each.owner == seq.owner)
        ]
        return not before or self.max_num_batched_tokens - busy_tokens > sum(before)

    def _victim(self, seq: Sequence | None, pending: Pending) -> Sequence | None:
        """Whom to pause for a sequence, or for the next that waits."""
        if all(self.waiting.is_alike(each) for each in self._arrivals.values()):
            return None
        seq = seq or self.waiting.next(self._held())
        return seq and whom_to_pause(seq, self.running, lambda each: len(each.tokens) - pending(each), self._can_resume)

    def _leave(self, seq: Sequence) -> None:
        self.rows[seq.row] = None
        seq.row = NO_ROW
        del self._arrivals[id(seq)]

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
        if not seq.stats.preemptions:
            seq.stats.start_time = time.perf_counter()
        self._arrivals[id(seq)] = seq
