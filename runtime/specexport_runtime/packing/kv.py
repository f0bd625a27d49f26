"""KV bookkeeping of one model: which rows are in use and how many entries of each are committed.

Rollback is arithmetic: entries written for rejected tokens are not counted in ``kv_len`` and the next step overwrites
them. The memory itself belongs to the executor. ``padded_kv`` has the bookkeeping of the padded method.
"""

from collections.abc import Sequence as Seq

from specexport_runtime.errors import SpecexportError


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
        """Cache entries that the next step of ``row`` writes behind: its committed ones."""
        return self._kv_lens[row]

    def write(self, first_row: int, counts: Seq[int]) -> None:
        """A step is about to write ``counts[i]`` entries after the committed ones of row ``first_row + i``.

        SpecexportError if a row cannot hold them; no row is changed then.
        """
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

    def touch(self, row: int, entries: int) -> None:
        """The first ``entries`` of ``row`` were written to."""
        self._touched[row] = max(self._touched[row], entries)

    def untouch(self, row: int, kept: int) -> None:
        """The memory of all but the first ``kept`` entries of ``row`` went back to the system."""
        self._touched[row] = min(self._touched[row], kept)

    def commit(self, row: int, kv_len: int) -> None:
        """Make ``kv_len`` the committed length of ``row``; what lies beyond is forgotten.

        SpecexportError if entries would be committed that were never written.
        """
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

    def assume(self, row: int, kv_len: int, pending: int = 0) -> None:  # noqa: ARG002
        """For measuring: say that ``row`` has ``kv_len`` entries, whatever they hold; it must have room for them.

        ``pending`` counts the last of them that are not in its state yet (``StateArena``).
        """
        missing = kv_len - self.kv_len(row)
        if missing > 0:
            self.write(row, [missing])
        self.commit(row, kv_len)

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

    def write(self, first_row: int, counts: Seq[int]) -> None:
        """Nothing: a step writes no entries."""

    def commit(self, row: int, kv_len: int) -> None:
        """Nothing: only the lender's rows grow."""

    def move(self, source: int, destination: int) -> None:
        """Nothing: the lender moves its rows."""

    def restore(self, row: int, kv_len: int, state_len: int = 0) -> None:
        """Nothing: the lender takes over what its rows have."""

    def release(self, row: int) -> None:
        """Nothing: the lender forgets its rows."""
