"""KV bookkeeping of the padded method: all rows of a batch advance by the most that one of them accepted.

The baseline of EMS-SD (Ni et al. 2025): where a sequence accepted fewer tokens than the longest of its
batch, its row gets padding entries, which the attention mask hides. Tokens keep their true positions; only their place
in the cache moves.

::

    row 0:  t0 t1 t2 t3 t4 t5 |          entries 6, kv_len 6
    row 1:  t0 t1 t2 .  .  t3 |          entries 6, kv_len 4, kv_positions 0 1 2 -1 -1 3
"""

from collections.abc import Sequence as Seq

import numpy as np

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.kv import KvArena

PADDING = -1


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

    def fits(self, first_row: int, counts: Seq[int]) -> bool:
        """Whether ``counts[i]`` more entries fit into row ``first_row + i``."""
        return all(self._entries[first_row + i] + count <= self.capacity for i, count in enumerate(counts))

    def squeeze(self, row: int) -> Int64Array:
        """Drop the padding of ``row``; the executor must move the entries given back, ascending, to its front."""
        kept = np.flatnonzero(self.kv_positions[row, : self._entries[row]] != PADDING)
        self.kv_positions[row] = PADDING
        self.kv_positions[row, : len(kept)] = np.arange(len(kept))
        self._entries[row] = self._written[row] = len(kept)
        return kept

    def write(self, first_row: int, counts: Seq[int]) -> None:
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
            self.touch(row, start + count)

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
