"""KV bookkeeping of one model: which rows are in use and how many entries of each are committed.

Rollback is arithmetic: entries written for rejected tokens are not counted in ``kv_len`` and the next step overwrites
them. The memory itself belongs to the executor.
"""

from specexport_runtime.errors import SpecexportError


class KvArena:
    """Committed lengths of ``num_rows`` cache rows that hold ``capacity`` entries each.

    ::

        row:  [ committed entries | written, not committed | free ]
              0             kv_len                          capacity

    Args:
        num_rows: rows in the executor's cache.
        capacity: entries a row can hold (L).
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._kv_lens = [0] * num_rows
        self._written = [0] * num_rows

    def kv_len(self, row: int) -> int:
        """Committed entries of ``row``."""
        return self._kv_lens[row]

    def write(self, row: int, count: int) -> None:
        """A step wrote ``count`` entries after the committed ones of ``row``.

        Raises:
            SpecexportError: the row cannot hold them; nothing may have been written before this was called.
        """
        end = self._kv_lens[row] + count
        if end > self.capacity:
            raise SpecexportError(f"KV row {row} holds {self.capacity} entries; a step would write entry {end}.")
        self._written[row] = end

    def commit(self, row: int, kv_len: int) -> None:
        """Make ``kv_len`` the committed length of ``row``; what lies beyond is forgotten.

        Raises:
            SpecexportError: entries would be committed that were never written.
        """
        if not 0 <= kv_len <= self._written[row]:
            raise SpecexportError(f"KV row {row}: cannot commit {kv_len} entries, {self._written[row]} were written.")
        self._kv_lens[row] = self._written[row] = kv_len

    def move(self, source: int, destination: int) -> None:
        """Row ``source`` was copied to row ``destination``; ``source`` becomes empty."""
        self._kv_lens[destination] = self._written[destination] = self._kv_lens[source]
        self.release(source)

    def release(self, row: int) -> None:
        """Forget everything in ``row``."""
        self._kv_lens[row] = self._written[row] = 0

    def check(self) -> None:
        """Assert the invariants: ``0 <= kv_len <= written <= capacity`` in every row.

        Raises:
            SpecexportError: an invariant does not hold.
        """
        for row, (kv_len, written) in enumerate(zip(self._kv_lens, self._written, strict=True)):
            if not 0 <= kv_len <= written <= self.capacity:
                raise SpecexportError(f"KV row {row}: kv_len {kv_len}, written {written}, capacity {self.capacity}.")
