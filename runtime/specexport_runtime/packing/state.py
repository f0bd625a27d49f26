"""Bookkeeping of models that keep a state a row, beside their KV caches: where each state is, and what waits for it.

A state cannot go back, so drafts do not enter it. What they gave to the recurrences waits in the row, *pending*; once
they are accepted, they enter the state at the beginning of the row's next step. ::

    row:  [ in the state | pending: accepted, or drafts | … ]
          0        state_at                        written

A target that drafts with its own layers reads what is pending in each draft step, and settles nothing of it: what a
draft step reads is pending behind that, until the verify step drops it and settles what was accepted.
"""

from collections.abc import Sequence as Seq

import numpy as np

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.kv import KvArena


class StateArena(KvArena):
    """A KV arena whose rows also have states, and room for ``num_pending`` (S) tokens that wait to enter them."""

    def __init__(self, num_rows: int, capacity: int, num_pending: int) -> None:
        super().__init__(num_rows, capacity)
        self.num_pending = num_pending
        self._state_at = [0] * num_rows

    def state_len(self, row: int) -> int:
        """Tokens of ``row`` that its state has; no text that is shorter can go on from it."""
        return self._state_at[row]

    def step(self, first_row: int, given: Seq[tuple[int, int | None]]) -> Int64Array:
        """What the next step does with the states of its rows, ``abi.STATE_STEPS`` [B, 4].

        ``given`` has the new tokens of each row, and how many of the last tokens that it then has are drafts; None lets
        nothing enter its state. SpecexportError if a row would go back behind its state, or keep too many drafts.
        """
        steps = np.zeros((len(given), 4), np.int64)
        for row, (count, drafts) in enumerate(given, start=first_row):
            if not count:
                continue
            known, at = self._kv_lens[row], self._state_at[row]
            for_good = at if drafts is None else known + count - drafts
            if known < at or for_good < at or known + count - for_good > self.num_pending:
                raise SpecexportError(
                    f"row {row} has {known} tokens and a state behind {at}; a step of {count} tokens would leave "
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
        """See ``KvArena.restore``; the state that was put there has ``state_len`` of the tokens.

        SpecexportError also if it has more than are committed, or leaves more than can wait.
        """
        state_len = state_len if kv_len else 0
        if not kv_len - self.num_pending <= state_len <= kv_len:
            raise SpecexportError(f"KV row {row}: a state of {state_len} tokens does not fit {kv_len} entries.")
        super().restore(row, kv_len)
        self._state_at[row] = state_len

    def assume(self, row: int, kv_len: int, pending: int = 0) -> None:
        """See ``KvArena.assume``; SpecexportError also if so many cannot wait."""
        if not 0 <= pending <= min(kv_len, self.num_pending):
            raise SpecexportError(f"KV row {row}: {pending} of {kv_len} tokens cannot wait, {self.num_pending} can.")
        self._state_at[row] = 0
        super().assume(row, kv_len)
        self._state_at[row] = kv_len - pending

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
