"""Prefix reuse: rows keep the text of sequences that ended, and the next one that begins alike goes on from there.

::

    rows:   0 … n-1           n … R-1
            sequences run     kept prefixes, or nothing

A sequence that is admitted takes the longest common beginning of its prompt and of any text that a row has: a kept
one, or one that runs (its committed entries never change). What it finds in its own row it goes on from, and what is
elsewhere is copied. What its row held for others moves to another row, or is forgotten: rows that say no more than
others do go first, then rows that were not used for the longest time.

The numbers are what reading the prompt would have given: an entry depends on the tokens before it, and engines
give a token the same bits in a step of any width. Entries are never shifted to other positions.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.drafters.base import PrefixDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sequences.sequence import Sequence

LEAST_REUSED = 16
"""Fewer tokens than this are read again: short texts would fill the rows."""
WORTH_WAITING = 64
"""Tokens that another sequence is about to read, for which one that begins with them too waits a few steps."""
SHORT_TAIL = 32
"""A kept text that is continued loses at most this many of its last tokens; one that would lose more is copied."""


@dataclass
class KeptPrefix:
    """The text of a row that no sequence runs in."""

    tokens: Int64Array  # [n]; the row has the entries of all of them
    scope: tuple[str, int | None]  # who may go on from it, and with which adapter
    drafts: Any  # what the drafter has of the row
    used: int  # when it was last used, in admissions
    is_pinned: bool = False  # it stays, whatever comes


class _Match(NamedTuple):
    """A row whose text begins as a prompt does."""

    common: int
    reused: int
    row: int
    drafts: Any
    kept: KeptPrefix | None


class PrefixCounts(NamedTuple):
    """What prefix reuse did, in tokens, as vLLM counts it."""

    queries: int = 0  # of prompts that were looked up
    hits: int = 0  # of these, not read again
    copied: int = 0  # entries copied from one row to another, for hits and to make room


class Prefixes:
    """The texts in the cache rows of an engine; without ``memory`` nothing bounds the bytes of rows."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: PrefixDrafter,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.counts = PrefixCounts()
        self._target, self._drafter = target, drafter
        self._memory = memory or MemoryBudget([target])
        self._kept: dict[int, KeptPrefix] = {}
        self._clock = 0

    @property
    def num_kept(self) -> int:
        """Rows that hold a text that nobody runs."""
        return len(self._kept)

    @property
    def num_entries(self) -> int:
        """Cache entries of these; may be asked from any thread."""
        return sum([len(kept.tokens) for kept in tuple(self._kept.values())])

    def is_early(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        """Whether a sequence should wait: another is reading a beginning that both have, and will have it soon."""
        if seq.row_scope is None or seq.is_scored:
            return False
        prompt = np.asarray(seq.tokens, np.int64)
        coming, there = 0, 0
        for other in running:
            if other.is_decoding or other.row_scope != seq.row_scope:
                continue
            common = _common(prompt, np.asarray(other.tokens, np.int64))
            if common > coming:
                coming, there = common, self._target.kv.kv_len(other.row)
        if coming - there < WORTH_WAITING:
            return False
        found = self._longest(seq, running)
        return coming - (0 if found is None else found.reused) >= WORTH_WAITING

    def begin(self, seq: Sequence, running: Seq[Sequence]) -> None:
        """A sequence got a cache row: let it go on from what rows have of its prompt, or of its text if it was paused.

        Nothing of it was read yet; ``running`` are all that hold a row.
        """
        self._clock += 1
        found, is_new = None, not seq.stats.preemptions
        if seq.row_scope is not None and not seq.is_scored:
            found = self._longest(seq, running)
            if is_new:
                seq.stats.cached_tokens = 0
                self.counts = self.counts._replace(queries=self.counts.queries + seq.num_prompt_tokens)
        is_continued = self._make_room(seq, found, running)
        if found is None:
            self._vacate(seq.row, running)
            self._memory.reserve(seq)
            return
        if found.kept is not None:
            found.kept.used = self._clock
        source = found.row
        if is_continued and source == seq.row:
            del self._kept[source]
        elif is_continued:
            self._take(source, seq.row, found.reused)
            source = seq.row
        elif (place := self._vacate(seq.row, running, but=source)) is not None and source == seq.row:
            source = place
        self._memory.reserve(seq)
        if source != seq.row:
            self._copy(source, seq.row, found.reused, found.drafts)
        self._target.go_on(seq.row, found.reused)
        self._drafter.adopt(seq, found.drafts, found.reused)
        if is_new:
            seq.stats.cached_tokens = found.reused
            self.counts = self.counts._replace(hits=self.counts.hits + found.reused)

    def _make_room(self, seq: Sequence, found: _Match | None, running: Seq[Sequence]) -> bool:
        """Kept texts go until a sequence fits, cheap ones first; whether it goes on from the row of ``found`` itself.

        A text that it continues is kept again when it ends; one that would lose more of its own stays, where there is
        memory for both.
        """
        may_lose, is_continued = False, False
        if found is not None and found.kept is not None and not found.kept.is_pinned:
            may_lose, is_continued = True, len(found.kept.tokens) - found.common <= SHORT_TAIL
        room = self._memory.room_beside(seq, [other.row for other in running if other is not seq])
        if room is None:
            return is_continued
        others = [row for row in self._kept if found is None or row != found.row]
        room -= self._memory.bytes_of(self._kept if not is_continued else others)
        if room < 0:
            for row in sorted(others, key=lambda row: self._worth(self._kept[row], row)):
                if room >= 0 or self._kept[row].is_pinned:
                    break
                room += self._memory.bytes_of([row])
                self._drop(row)
        return is_continued or (room < 0 and may_lose)

    def keep(self, seq: Sequence) -> bool:
        """A sequence leaves its row: keep its text there, if another may go on from it.

        False: it is not kept, and the caller clears the row.
        """
        count = self._target.kv.kv_len(seq.row)
        if seq.is_pinned:
            count = min(count, seq.num_prompt_tokens)
        if seq.row_scope is None or seq.finish_reason == "error" or count < LEAST_REUSED:
            return False
        self._memory.keep(seq.row, count)
        self._kept[seq.row] = KeptPrefix(
            np.asarray(seq.tokens[:count], np.int64),
            seq.row_scope,
            self._drafter.snapshot(seq),
            self._clock,
            seq.is_pinned,
        )
        self._target.forget_row(seq.row)
        self._drafter.forget_row(seq.row)
        return True

    def make_way(self, source: int, destination: int) -> bool:
        """The sequence of a row moves to another, where a text may be kept: they change places.

        False: nothing is kept there, and nothing was moved.
        """
        kept = self._kept.pop(destination, None)
        if kept is None:
            return False
        counts = (self._target.kv.kv_len(source), len(kept.tokens))
        self._target.swap_rows(source, destination, counts)
        self._target.kv.move(source, destination)
        self._drafter.swap_rows(source, destination, (None, kept.drafts))
        self._memory.swap(source, destination)
        self._kept[source] = kept
        self.counts = self.counts._replace(copied=self.counts.copied + counts[1])
        return True

    def unpin(self, tokens: Seq[int], scope: str, adapter: int | None = None) -> bool:
        """Let a text that is kept for good go when its row is wanted; may be called from any thread.

        False: there was none.
        """
        wanted, found = list(tokens), False
        for kept in tuple(self._kept.values()):
            if kept.is_pinned and kept.scope == (scope, adapter) and kept.tokens.tolist() == wanted:
                kept.is_pinned, found = False, True
        return found

    @property
    def pinned_rows(self) -> list[int]:
        """Rows of texts that are kept for good; may be asked from any thread."""
        return [row for row, kept in tuple(self._kept.items()) if kept.is_pinned]

    def clear(self) -> None:
        """Forget all of them."""
        for row in tuple(self._kept):
            self._drop(row)

    def check(self, running: Seq[Sequence]) -> None:
        """Assert that no row is kept and used at a time, or counted as used while it is kept; else SpecexportError."""
        for row in self._kept:
            if any(seq.row == row for seq in running) or self._target.kv.kv_len(row):
                raise SpecexportError(f"row {row} is kept for later and in use.")

    def _longest(self, seq: Sequence, running: Seq[Sequence]) -> _Match | None:
        prompt = np.asarray(seq.tokens, np.int64)
        best: _Match | None = None
        for row, kept, tokens, drafts in self._texts(seq, running):
            common = _common(prompt, tokens)
            reused = min(common, len(prompt) - 1)  # the last token is read again: its logits are wanted
            least = max(LEAST_REUSED, self._target.least_len(row))
            if reused < least or (best is not None and reused < best.reused):
                continue
            given = self._drafter.snapshot(drafts) if isinstance(drafts, Sequence) else drafts
            reused = self._drafter.usable(seq, given, reused)
            # Of equal ones, that in its own row: nothing is copied.
            is_better = best is None or (reused, row == seq.row) > (best.reused, best.row == seq.row)
            if reused >= least and is_better:
                best = _Match(common, reused, row, given, kept)
        return best

    def _texts(self, seq: Sequence, running: Seq[Sequence]) -> Iterator[tuple[int, KeptPrefix | None, Int64Array, Any]]:
        """Row, what is kept, tokens, and what the drafter has, of every text that a sequence may go on from."""
        for row, kept in self._kept.items():
            if kept.scope == seq.row_scope:
                yield row, kept, kept.tokens, kept.drafts
        for other in running:
            count = self._target.kv.kv_len(other.row)
            if other is not seq and count and other.row_scope == seq.row_scope:
                yield other.row, None, np.asarray(other.tokens[:count], np.int64), other

    def _take(self, source: int, row: int, count: int) -> None:
        """The first tokens of what ``source`` has are in ``row`` now, and it is no longer kept; what ``row`` had is."""
        taken, homeless = self._kept.pop(source), self._kept.pop(row, None)
        self._memory.free(source)
        self._exchange(source, row, (count, 0 if homeless is None else len(homeless.tokens)), (taken, homeless))

    def _exchange(
        self, one: int, other: int, counts: tuple[int, int], kept: tuple[KeptPrefix, KeptPrefix | None]
    ) -> None:
        """Exchange texts of two rows; the second is kept in the first one's row then."""
        of_one, of_other = kept
        self._target.swap_rows(one, other, counts)
        self._drafter.swap_rows(one, other, (of_one.drafts, None if of_other is None else of_other.drafts))
        self._memory.swap(one, other)
        if of_other is not None:
            self._kept[one] = of_other
        self.counts = self.counts._replace(copied=self.counts.copied + sum(counts))

    def _copy(self, source: int, row: int, count: int, drafts: Any) -> None:
        self._target.copy_row(source, row, count)
        self._drafter.copy_row(source, row, drafts)
        self.counts = self.counts._replace(copied=self.counts.copied + count)

    def _drop(self, row: int) -> None:
        """Forget the text of a row."""
        del self._kept[row]
        self._memory.free(row)

    def _empty(self, row: int, running: Seq[Sequence]) -> int | None:
        """A row that nobody uses for anything."""
        taken = {seq.row for seq in running} | {row}
        # From the end: sequences fill the rows from the front.
        rows = reversed(range(self._target.kv.num_rows))
        free = (at for at in rows if at not in taken and at not in self._kept)
        return next(free, None)

    def _vacate(self, row: int, running: Seq[Sequence], but: int | None = None) -> int | None:
        """What is kept in a row goes elsewhere, at the cost of what is worth less; ``but`` is not to be touched.

        Returns where it is now; None if nothing was kept, or if it was forgotten: the row's memory has its entries
        still.
        """
        kept = self._kept.get(row)
        if kept is None:
            return None
        place = self._empty(row, running)
        if place is None and (place := self._least(kept, row, but)) is not None:
            self._drop(place)
        if place is None:
            self._drop(row)
            return None
        del self._kept[row]
        self._exchange(row, place, (len(kept.tokens), 0), (kept, None))
        self._kept[place] = kept
        return place

    def _least(self, homeless: KeptPrefix, row: int, but: int | None) -> int | None:
        """The row whose text is worth less than one that has no row; None if there is none."""
        worst, place = self._worth(homeless, None), None
        for at, kept in self._kept.items():
            if at not in (row, but) and not kept.is_pinned and (worth := self._worth(kept, at)) < worst:
                worst, place = worth, at
        return place

    def _worth(self, kept: KeptPrefix, at: int | None) -> tuple[bool, bool, int]:
        """Pinned ones are worth the most, those that another has the beginning of the least; then the older ones."""
        size = len(kept.tokens)
        contained = any(
            other is not kept
            and row != at
            and other.scope == kept.scope
            and len(other.tokens) >= size
            and (other.tokens[:size] == kept.tokens).all()
            for row, other in self._kept.items()
        )
        return kept.is_pinned, not contained, kept.used


def _common(prompt: Int64Array, tokens: Int64Array) -> int:
    """Tokens that two texts have in common from their beginning."""
    size = min(len(prompt), len(tokens))
    different = prompt[:size] != tokens[:size]
    return int(different.argmax()) if different.any() else size
