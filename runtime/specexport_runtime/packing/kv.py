"""KV bookkeeping of one model: which rows are in use and how many entries of each are committed.

Rollback is arithmetic: entries written for rejected tokens are not counted in ``kv_len`` and the next step overwrites
them. The memory itself belongs to the executor.

In the padded method all rows of a batch advance by the most that one of them accepted: the baseline of EMS-SD (Ni et
al. 2025). Where a sequence accepted fewer tokens than the longest of its batch, its row gets padding entries, which the
attention mask hides. Tokens keep their true positions; only their place in the cache moves.

::

    row 0:  t0 t1 t2 t3 t4 t5 |          entries 6, kv_len 6
    row 1:  t0 t1 t2 .  .  t3 |          entries 6, kv_len 4, kv_positions 0 1 2 -1 -1 3

Models that keep a state a row have another bookkeeping beside it: where each state is, and what waits for it. A state
cannot go back, so drafts do not enter it. What they gave to the recurrences waits in the row, *pending*; once they are
accepted, they enter the state at the beginning of the row's next step. ::

    row:  [ in the state | pending: accepted, or drafts | … ]
          0        state_at                        written

A target that drafts with its own layers reads what is pending in each draft step, and settles nothing of it: what a
draft step reads is pending after that, until the verify step drops it and settles what was accepted.
"""

from collections.abc import Sequence

import numpy as np

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int64Array

PADDING = -1


class KvArena:
    """Committed lengths of ``num_rows`` cache rows that hold ``capacity`` entries each.

    ::

        row:  [ committed entries | written, not committed | free ]
              0             kv_len                          capacity
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._kv_lens = [0] * num_rows
        self._written = [0] * num_rows
        self._touched = [0] * num_rows

    def kv_len(self, row: int) -> int:
        """Committed entries of ``row``."""
        return self._kv_lens[row]

    @property
    def num_committed(self) -> int:
        """Committed entries of all rows together."""
        return sum(self._kv_lens)

    def entries(self, row: int) -> int:
        """Cache entries that the next step of ``row`` writes after: its committed ones."""
        return self._kv_lens[row]

    def write(self, first_row: int, counts: Sequence[int]) -> None:
        """A step is about to write ``counts[i]`` entries to row ``first_row + i``; SpecexportError if one is full."""
        ends = [kv_len + count for kv_len, count in zip(self._kv_lens[first_row:], counts, strict=False)]
        if max(ends) > self.capacity:
            row = first_row + ends.index(max(ends))
            raise SpecexportError(f"KV row {row} holds {self.capacity} entries; a step would write entry {max(ends)}.")
        self._written[first_row : first_row + len(ends)] = ends
        touched = self._touched
        for row, end in enumerate(ends, start=first_row):
            if end > touched[row]:  # noqa: PLR1730 - in every step, and faster than max
                touched[row] = end

    def touched(self, row: int) -> int:
        """Entries of ``row`` that any sequence wrote to since its memory went back to the system."""
        return self._touched[row]

    def mark_written(self, row: int, entries: int) -> None:
        """The first ``entries`` of ``row`` were written to."""
        self._touched[row] = max(self._touched[row], entries)

    def mark_released(self, row: int, kept: int) -> None:
        """The memory of all but the first ``kept`` entries of ``row`` went back to the system."""
        self._touched[row] = min(self._touched[row], kept)

    def commit(self, row: int, kv_len: int) -> None:
        """Make ``kv_len`` the committed length of ``row``; SpecexportError beyond what was written."""
        if not 0 <= kv_len <= self._written[row]:
            raise SpecexportError(f"KV row {row}: cannot commit {kv_len} entries, {self._written[row]} were written.")
        self._kv_lens[row] = self._written[row] = kv_len

    def move(self, source: int, destination: int) -> None:
        """Row ``source`` was copied to row ``destination``; ``source`` becomes empty."""
        self._kv_lens[destination] = self._written[destination] = self._kv_lens[source]
        self.release(source)

    def restore(self, row: int, kv_len: int, state_len: int = 0) -> None:  # noqa: ARG002
        """The first ``kv_len`` entries of an empty row were put there without a step, and are committed.

        SpecexportError if the row is not empty, or cannot hold them. ``StateArena`` uses ``state_len``.
        """
        if self._kv_lens[row] or not 0 <= kv_len <= self.capacity:
            raise SpecexportError(f"KV row {row}: cannot take over {kv_len} entries, it has {self._kv_lens[row]}.")
        self._kv_lens[row] = self._written[row] = kv_len

    def release(self, row: int) -> None:
        """Forget everything in ``row``."""
        self._kv_lens[row] = self._written[row] = 0

    def check(self) -> None:
        """Assert the invariants: ``0 <= kv_len <= written <= capacity`` in every row, else SpecexportError."""
        for row, (kv_len, written) in enumerate(zip(self._kv_lens, self._written, strict=True)):
            if not 0 <= kv_len <= written <= self.capacity:
                raise SpecexportError(f"KV row {row}: kv_len {kv_len}, written {written}, capacity {self.capacity}.")


class BorrowedKv(KvArena):
    """The lengths of another model's rows, for an engine that reads that model's cache and writes nothing."""

    def __init__(self, lender: KvArena) -> None:
        super().__init__(lender.num_rows, lender.capacity)
        self._lender = lender

    def kv_len(self, row: int) -> int:
        """Committed entries of ``row``: the lender's."""
        return self._lender.kv_len(row)

    def entries(self, row: int) -> int:
        """The same: there is no padding among them."""
        return self._lender.kv_len(row)

    def write(self, first_row: int, counts: Sequence[int]) -> None:
        """Nothing: a step writes no entries."""

    def commit(self, row: int, kv_len: int) -> None:
        """Nothing: only the lender's rows grow."""

    def move(self, source: int, destination: int) -> None:
        """Nothing: the lender moves its rows."""

    def restore(self, row: int, kv_len: int, state_len: int = 0) -> None:
        """Nothing: the lender takes over what its rows have."""

    def release(self, row: int) -> None:
        """Nothing: the lender forgets its rows."""


class PaddedKvArena(KvArena):
    """A :class:`KvArena` whose rows also hold padding entries."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        super().__init__(num_rows, capacity)
        # [num_rows, capacity]: position of the token in each entry, -1 for padding.
        self.kv_positions: Int64Array = np.full((num_rows, capacity), PADDING, np.int64)
        self._entries = [0] * num_rows

    def entries(self, row: int) -> int:
        """Cache entries in use in ``row``, padding included."""
        return self._entries[row]

    def align(self, first_row: int, num_rows: int) -> None:
        """Pad ``num_rows`` rows from ``first_row`` to the longest of them."""
        longest = max(self._entries[first_row : first_row + num_rows])
        for row in range(first_row, first_row + num_rows):
            # What an earlier step wrote and did not commit must not count as part of the gap.
            self.kv_positions[row, self._entries[row] :] = PADDING
            self._entries[row] = longest

    def fits(self, first_row: int, counts: Sequence[int]) -> bool:
        """Whether ``counts[i]`` more entries fit into row ``first_row + i``."""
        return all(self._entries[first_row + i] + count <= self.capacity for i, count in enumerate(counts))

    def squeeze(self, row: int) -> Int64Array:
        """Drop the padding of ``row``; the executor must move the entries given back, ascending, to its front."""
        kept = np.flatnonzero(self.kv_positions[row, : self._entries[row]] != PADDING)
        self.kv_positions[row] = PADDING
        self.kv_positions[row, : len(kept)] = np.arange(len(kept))
        self._entries[row] = self._written[row] = len(kept)
        return kept

    def write(self, first_row: int, counts: Sequence[int]) -> None:
        """As :meth:`KvArena.write`; the new entries get the positions that follow the committed tokens."""
        if not self.fits(first_row, counts):
            raise SpecexportError(
                f"KV rows from {first_row} hold {self.capacity} entries; {max(counts)} more do not fit."
            )
        for row, count in enumerate(counts, start=first_row):
            start, kv_len = self._entries[row], self._kv_lens[row]
            self.kv_positions[row, start : start + count] = np.arange(kv_len, kv_len + count)
            self.kv_positions[row, start + count :] = PADDING
            self._written[row] = start + count
            self.mark_written(row, start + count)

    def commit(self, row: int, kv_len: int) -> None:
        """Make ``kv_len`` tokens of ``row`` committed; entries of later tokens become padding or free."""
        positions = self.kv_positions[row, : self._written[row]]
        if not 0 <= kv_len <= int(positions.max(initial=PADDING)) + 1:
            raise SpecexportError(f"KV row {row}: cannot commit {kv_len} entries, they were not written.")
        positions[positions >= kv_len] = PADDING
        self._kv_lens[row] = kv_len
        self._entries[row] = int(positions.argmax()) + 1 if kv_len else 0
        self._written[row] = self._entries[row]

    def move(self, source: int, destination: int) -> None:
        """Row ``source`` was copied to row ``destination``; ``source`` becomes empty."""
        self.kv_positions[destination] = self.kv_positions[source]
        self._entries[destination] = self._entries[source]
        super().move(source, destination)
        self._written[destination] = self._entries[destination]

    def release(self, row: int) -> None:
        """Forget everything in ``row``."""
        super().release(row)
        self._entries[row] = 0
        self.kv_positions[row] = PADDING

    def check(self) -> None:
        """Assert the invariants: each row holds the positions 0 … kv_len - 1, once each and in order."""
        for row, (kv_len, entries) in enumerate(zip(self._kv_lens, self._entries, strict=True)):
            held = self.kv_positions[row, :entries]
            if entries > self.capacity or held[held != PADDING].tolist() != list(range(kv_len)):
                raise SpecexportError(f"KV row {row}: kv_len {kv_len}, but its {entries} entries hold {held.tolist()}.")


class StateArena(KvArena):
    """A KV arena whose rows also have states, and room for ``num_pending`` (S) tokens that wait to enter them."""

    def __init__(self, num_rows: int, capacity: int, num_pending: int) -> None:
        super().__init__(num_rows, capacity)
        self.num_pending = num_pending
        self._state_at = [0] * num_rows

    def state_len(self, row: int) -> int:
        """Tokens of ``row`` that its state has; no text that is shorter can go on from it."""
        return self._state_at[row]

    def step(self, first_row: int, given: Sequence[tuple[int, int | None]]) -> Int64Array:
        """What the next step does with the states of its rows, ``abi.STATE_STEPS`` [B, 4].

        ``given`` has each row's new tokens, and how many of its last tokens are drafts; None lets nothing enter.
        SpecexportError if a row would go back after its state, or keep too many drafts.
        """
        steps = np.zeros((len(given), 4), np.int64)
        for row, (count, drafts) in enumerate(given, start=first_row):
            if not count:
                continue
            known, at = self._kv_lens[row], self._state_at[row]
            for_good = at if drafts is None else known + count - drafts
            if known < at or for_good < at or known + count - for_good > self.num_pending:
                raise SpecexportError(
                    f"row {row} has {known} tokens and a state after {at}; a step of {count} tokens would leave "
                    f"{known + count - for_good} drafts, and {self.num_pending} can wait."
                )
            settled = min(for_good, known) - at
            certain = max(for_good - known, 0)
            steps[row - first_row] = (settled, known - at - settled, certain, count - certain)
            self._state_at[row] = for_good
        return steps

    def commit(self, row: int, kv_len: int) -> None:
        """See ``KvArena.commit``; SpecexportError also if less would be committed than the state has."""
        if kv_len < self._state_at[row]:
            raise SpecexportError(f"KV row {row}: cannot go back to {kv_len} tokens, its state has more.")
        super().commit(row, kv_len)

    def move(self, source: int, destination: int) -> None:
        """See ``KvArena.move``."""
        self._state_at[destination] = self._state_at[source]
        super().move(source, destination)

    def restore(self, row: int, kv_len: int, state_len: int = 0) -> None:
        """See ``KvArena.restore``; SpecexportError also if a state of ``state_len`` tokens does not fit."""
        state_len = state_len if kv_len else 0
        if not kv_len - self.num_pending <= state_len <= kv_len:
            raise SpecexportError(f"KV row {row}: a state of {state_len} tokens does not fit {kv_len} entries.")
        super().restore(row, kv_len)
        self._state_at[row] = state_len

    def release(self, row: int) -> None:
        """See ``KvArena.release``."""
        super().release(row)
        self._state_at[row] = 0

    def check(self) -> None:
        """See ``KvArena.check``; a state has no more tokens than are committed, and at most S fewer."""
        super().check()
        for row, (kv_len, at) in enumerate(zip(self._kv_lens, self._state_at, strict=True)):
            if not kv_len - self.num_pending <= at <= kv_len:
                raise SpecexportError(f"KV row {row}: kv_len {kv_len}, a state of {at}, {self.num_pending} can wait.")
