"""A budget for the memory of the KV cache: what running requests may come to need, and what is really there.

::

    limit  ├─────────────┬──────────┬───────────────┬───────┬─ free ─┤
           │ row 0 may   │ row 1    │ kept texts    │ spare │
           │ come to need│          │ (go first)    │       │

Rows are as long as the longest text may be, in addresses. In memory a row takes what was written to it, and goes back
page by page, so that more rows can be there than the budget holds at their full length. A request begins when all that
it may come to need fits beside what the others may: its prompt, ``max_tokens`` and the slack of a verification. So none
ever has to stop, to move or to be taken out again, and what does not fit waits in order. What no request holds any
more stays as a spare for the next, up to a share of the budget: pages that went back come again as zeros, one fault
each.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.gpu import format_gib
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.request import Request

SPARE_SHARE = 1 / 8
"""Of the budget: memory of rows that no request holds, which stays resident for the next requests."""


class Holding(NamedTuple):
    """What a row is held for."""

    entries: tuple[int, ...]  # cache entries, of each model
    num_bytes: int  # memory of these, in whole pages


_NOTHING = Holding((), 0)


class _Use(NamedTuple):
    """A row's bytes: what it is held for, and what is resident beyond that; and the latter alone."""

    row: int
    taken: int
    spare: int


class MemoryBudget:
    """Memory of the cache rows of all ``runners``; InvalidRequestError if no full request fits a limit."""

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        *,
        limit: int | None = None,
        slack: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        self.runners = [runner for runner in runners if not runner.executor.borrows_cache]
        self.limit, self._slack = limit, slack  # bytes, None for no limit; entries beyond a request's tokens
        self._most = min(runner.kv.capacity for runner in self.runners) - slack  # tokens of a request at most
        if max_model_len is not None:
            self._most = min(self._most, max_model_len)
        self._held: dict[int, Holding] = {}
        if limit is not None:
            self._check_limit(limit)

    def _check_limit(self, limit: int) -> None:
        if not all(runner.gives_back for runner in self.runners):
            raise InvalidRequestError(
                "kv_cache_memory_bytes is set, and this engine cannot give memory of its KV cache back.",
                "leave it out; max_num_seqs and max_model_len then bound the cache.",
            )
        if (whole := self._holding(self._most).num_bytes) > limit:
            fitting = bisect_right(range(self._most), limit, key=lambda tokens: self._holding(tokens).num_bytes) - 1
            shorter = f"max_model_len of up to {fitting}" if fitting > 1 else "smaller max_model_len"
            raise InvalidRequestError(
                f"kv_cache_memory_bytes is {limit}, and one request of {self._most} tokens may take {whole} "
                f"({format_gib(whole)}).",
                f"give {whole} or more, or a {shorter}.",
            )

    def _holding(self, tokens: int) -> Holding:
        """A request of so many tokens, with a draft after it, in the caches of each model."""
        most = min(tokens, self._most)
        entries = [min(int(most * runner.stretch) + self._slack, runner.kv.capacity) for runner in self.runners]
        each = zip(self.runners, entries, strict=True)
        return Holding(tuple(entries), sum([runner.row_bytes(count) for runner, count in each]))

    def need(self, req: Request) -> Holding:
        """All that a request may come to need, whatever drafts for it."""
        return self._holding(req.num_prompt_tokens + req.max_tokens)

    def fits(self, req: Request, rows: Iterable[int]) -> bool:
        """Whether a request may begin beside what the rows ``rows`` are held for."""
        return self.limit is None or self.bytes_of(rows) + self.need(req).num_bytes <= self.limit

    def bytes_of(self, rows: Iterable[int]) -> int:
        """Bytes that some rows are held for; may be asked from any thread."""
        return sum([held.num_bytes for row in rows if (held := self._held.get(row)) is not None])

    def count_bytes_left(self, req: Request, rows: Iterable[int]) -> int | None:
        """Bytes that are left for kept texts when a request begins beside some rows; None for no limit."""
        return None if self.limit is None else self.limit - self.need(req).num_bytes - self.bytes_of(rows)

    def check_pin(self, num_tokens: int, pinned: Iterable[int]) -> None:
        """Refuse to keep a text for good if no request of full length would fit beside it and rows ``pinned``."""
        if self.limit is None:
            return
        left = self.limit - self._holding(self._most).num_bytes - self.bytes_of(pinned)
        if (wanted := self._holding(num_tokens).num_bytes) > left:
            raise InvalidRequestError(
                f"{num_tokens} tokens that are kept for good take {format_gib(wanted)}, and kv_cache_memory_bytes "
                f"leaves {format_gib(max(left, 0))} beside one request of full length.",
                "load the engine with more kv_cache_memory_bytes, or a smaller max_model_len.",
            )

    def max_entries(self, row: int) -> int:
        """Entries that the target may write to a row."""
        capacity, held = self.runners[0].kv.capacity, self._held.get(row)
        return capacity if self.limit is None or held is None else held.entries[0]

    def reserve(self, req: Request) -> None:
        """A request begins in its row: all that it may need is its own, and spare memory makes way."""
        self._held[req.row] = self.need(req)
        self.settle()

    def keep(self, row: int, num_tokens: int) -> None:
        """A text of so many tokens stays in a row, with its entries."""
        entries = (num_tokens, *(runner.kv.kv_len(row) for runner in self.runners[1:]))
        each = zip(self.runners, entries, strict=True)
        self._held[row] = Holding(entries, sum([runner.row_bytes(count) for runner, count in each]))

    def entries_of(self, row: int) -> tuple[int, ...]:
        """Cache entries of each model that a row is held for; may be asked from any thread."""
        return self._held.get(row, _NOTHING).entries

    def free(self, row: int) -> None:
        """Nobody holds a row any more."""
        self._held.pop(row, None)

    def swap(self, one: int, other: int) -> None:
        """What is in two rows changed places; either may hold nothing."""
        of_one, of_other = self._held.pop(one, None), self._held.pop(other, None)
        if of_other is not None:
            self._held[one] = of_other
        if of_one is not None:
            self._held[other] = of_one

    def settle(self) -> None:
        """Give memory back that no request holds, but a spare; of the last rows first: requests fill the front."""
        if self.limit is None:
            return
        uses = self._uses()
        spare = sum([use.spare for use in uses])
        over = max(sum([use.taken for use in uses]) - self.limit, spare - int(self.limit * SPARE_SHARE))
        for use in sorted(uses, key=lambda use: (use.row in self._held, -use.row)):
            if over <= 0:
                return
            if use.spare:
                held = self._held.get(use.row, _NOTHING)
                for i, runner in enumerate(self.runners):
                    runner.release_pages(use.row, held.entries[i] if held.entries else 0)
                over -= use.spare

    def _uses(self) -> "list[_Use]":
        uses = []
        for row in range(self.runners[0].kv.num_rows):
            touched, held = [runner.kv.touched(row) for runner in self.runners], self._held.get(row, _NOTHING)
            if any(touched) or held.entries:
                wanted = held.entries or (0,) * len(touched)
                each = list(zip(self.runners, touched, wanted, strict=True))
                resident = sum([runner.row_bytes(count) for runner, count, _ in each])
                used = sum([runner.row_bytes(min(count, most)) for runner, count, most in each])
                uses.append(_Use(row, held.num_bytes + resident - used, resident - used))
        return uses

    @property
    def resident_bytes(self) -> int:
        """Bytes of the rows that were written to and not given back; may be asked from any thread."""
        rows = range(self.runners[0].kv.num_rows)
        return sum([runner.row_bytes(runner.kv.touched(row)) for runner in self.runners for row in rows])

    def check(self) -> None:
        """Assert that what rows are held for, and what else is resident, is within the limit; else SpecexportError."""
        if self.limit is not None and (taken := sum([use.taken for use in self._uses()])) > self.limit:
            raise SpecexportError(f"{taken} bytes of KV cache are held or resident, of {self.limit}.")
