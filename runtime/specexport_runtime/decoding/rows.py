"""What requests have on the machine: cache rows with their lengths, memory, kept texts, the drafters' rows.

::

    rows:   0 … n-1           n … R-1
            requests run     kept texts, or nothing

The row of a request that ended is a hole, which the next request takes over at once; other holes are closed by moving
the last row. With prefix reuse the row keeps the text (``prefixes``). What a request finds in its own row it goes on
from, and what is elsewhere is copied. What its row held for others moves to another row, or is forgotten.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.prefix_files import PrefixFolder
from specexport_runtime.decoding.prefix_store import PrefixStore
from specexport_runtime.decoding.prefixes import (
    MIN_REUSED,
    WORTH_WAITING,
    KeptText,
    KeptTexts,
    PrefixCounts,
    PrefixMatch,
    count_common,
)
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.request import NO_ROW, Request
from specexport_runtime.telemetry.observers import EngineLoad


class Slots:
    """The cache slots (rows) of a target, its drafter and the memory of both."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        *,
        max_num_seqs: int | None = None,  # that run at a time; None takes all cache rows of the target
        memory: MemoryBudget | None = None,  # None: only the number of cache rows is bounded
        reuses_prefixes: bool = False,
        folder: PrefixFolder | None = None,  # where kept texts are, too
    ) -> None:
        num_rows = target.executor.num_rows
        self.target, self.drafter = target, drafter
        self.max_num_seqs = min(max_num_seqs or num_rows, num_rows)
        self.memory = memory or MemoryBudget([target])
        self.reuses_prefixes = reuses_prefixes
        self.placed: list[Request | None] = []  # by row; None is a hole
        self._arrivals: dict[int, Request] = {}  # the same by age
        self.kept, self.counts = KeptTexts(), PrefixCounts()
        self.stored = None if folder is None else PrefixStore(folder, self.memory, self.kept)
        self._clock = 0  # admissions
        self.preemptions = 0  # not told to observers yet

    @property
    def running(self) -> list[Request]:
        """Requests that hold a row, in row order."""
        return [req for req in self.placed if req is not None]

    @property
    def reading(self) -> list[Request]:
        """Requests that read their prompt, or their text again, the oldest first."""
        return [req for req in self._arrivals.values() if not req.is_decoding]

    @property
    def held(self) -> Counter[str]:
        """Rows that each owner holds."""
        return Counter(req.owner for req in self._arrivals.values())

    @property
    def free_row(self) -> int:
        """A row for the next request; ``NO_ROW`` if none is free."""
        if None in self.placed:
            return self.placed.index(None)
        return len(self.placed) if len(self.placed) < self.max_num_seqs else NO_ROW

    def at(self, row: int) -> Request:
        """The request of a row; SpecexportError if the row is empty."""
        req = self.placed[row]
        if req is None:
            raise SpecexportError(f"row {row} is empty.")
        return req

    def num_read(self, req: Request) -> int:
        """Tokens of a request that the target has seen."""
        return self.target.kv.kv_len(req.row) if req.row != NO_ROW else 0

    def num_unread(self, req: Request) -> int:
        """Tokens of a request that the target has not seen."""
        return len(req.tokens) - (self.target.kv.kv_len(req.row) if req.row != NO_ROW else 0)

    def ending(self, chunks: Mapping[int, int]) -> list[Request]:
        """Requests whose prompt ends in a step, of which ``chunks`` has the prompt tokens by row."""
        return [req for row, chunk in chunks.items() if self.num_unread(req := self.at(row)) == chunk]

    def num_reread(self, chunks: Mapping[int, int]) -> int:
        """Tokens of a step's chunks that were read before a pause."""
        known = [self.at(row).num_read - self.target.kv.kv_len(row) for row in chunks]
        return sum(min(count, max(more, 0)) for more, count in zip(known, chunks.values(), strict=True))

    def advance(self, row: int, count: int) -> None:
        """Commit ``count`` tokens that a request has read, with more to come."""
        self.target.kv.commit(row, self.target.kv.kv_len(row) + count)
        self._note_read(self.at(row))

    def _note_read(self, req: Request) -> None:
        """A paused request goes on as soon as all but its newest token is in its row."""
        if req.reads_again and self.num_unread(req) == 1:
            req.reads_again = False

    def fits(self, req: Request) -> bool:
        """Whether there is memory for all that a request may come to need; alone, there always is (``check_pin``)."""
        running = self.running
        return not running or self.memory.fits(req, self._reserved_by(running))

    def _reserved_by(self, running: list[Request]) -> list[int]:
        """Rows whose memory no other request may have: those of ``running``, and of texts that are kept for good."""
        return [*(row for req in running if (row := req.row) != NO_ROW), *self.kept.pinned_rows]

    def should_wait(self, req: Request) -> bool:
        """Whether a request should wait: more of its beginning is being read, by another request or from a file."""
        if not self.reuses_prefixes or req.row_scope is None or req.is_scored:
            return False
        return self._is_coming(req) or self._is_read(req)

    def _is_read(self, req: Request) -> bool:
        """Whether a file is being read that may have more of a request's text than any row."""
        if self.stored is None or not self.fits(req):
            return False
        whole = self.drafter.restored(dict.fromkeys(self.memory.runners, len(req.tokens)))
        if not self.drafter.usable(req, whole, len(req.tokens)):  # the target must read it
            return False
        return self.stored.is_reading(
            req, lambda: found.reused if (found := self._find_longest(req)) else 0, is_idle=not self.running
        )

    def forget_stored(self, req: Request) -> None:
        """A request needs nothing from files any more."""
        if self.stored is not None:
            self.stored.forget(req)

    def _is_coming(self, req: Request) -> bool:
        """Whether another request is reading a beginning that both have, and will have it soon."""
        prompt = np.asarray(req.tokens, np.int64)
        coming, there = 0, 0
        for other in self.running:
            if other.is_decoding or other.row_scope != req.row_scope:
                continue
            common = count_common(prompt, np.asarray(other.tokens, np.int64))
            if common > coming:
                coming, there = common, self.num_read(other)
        if coming - there < WORTH_WAITING:
            return False
        found = self._find_longest(req)
        return coming - (0 if found is None else found.reused) >= WORTH_WAITING

    def can_resume(self, req: Request) -> bool:
        """Whether a request could go on if it was paused."""
        return self.drafter.can_restart(req)

    def admit(self, req: Request, row: int) -> None:
        """Give a free row to a request; it goes on from what rows have of its prompt, or of its text after a pause."""
        if row == len(self.placed):
            self.placed.append(None)
        self.placed[row], req.row = req, row
        self._arrivals[id(req)] = req
        if not req.stats.preemptions:
            req.stats.start_time = time.perf_counter()
        self._start_request(req)
        self.forget_stored(req)
        self._note_read(req)

    def pause(self, req: Request) -> int:
        """Take its row, which is returned, from a request that will go on later."""
        row = req.row
        req.pause(self.num_read(req))
        self.leave(req)
        self.preemptions += 1
        return row

    def leave(self, req: Request) -> None:
        """A request leaves its row, which keeps its text if another may go on from it, or is cleared."""
        row = req.row
        if not self._keep_text(req):
            self.target.release_row(row)
            self.drafter.release_row(row)
            self.memory.free(row)
        self.memory.settle()
        self.placed[row], req.row = None, NO_ROW
        del self._arrivals[id(req)]

    def _keep_text(self, req: Request) -> bool:
        """Keep the text of a row, if another may go on from it; False if not."""
        count = self.num_read(req)
        if req.is_pinned:
            count = min(count, req.num_prompt_tokens)
        scope = req.row_scope
        if not self.reuses_prefixes or scope is None or req.finish_reason == "error" or count < MIN_REUSED:
            return False
        self.memory.keep(req.row, count)
        tokens = np.asarray(req.tokens[:count], np.int64)
        self.kept[req.row] = KeptText(tokens, scope, self.drafter.snapshot(req), self._clock, req.is_pinned)
        self.target.forget_row(req.row)
        self.drafter.forget_row(req.row)
        if self.stored is not None:
            self.stored.note_kept(count)
        return True

    def close_holes(self) -> None:
        """Move the last rows to the holes before them."""
        while None in self.placed:
            if (last := self.placed[-1]) is not None:
                hole = self.placed.index(None)
                self._move(last.row, hole)  # while it is known to run where it is
                last.row, self.placed[hole] = hole, last
            self.placed.pop()

    def clear(self) -> None:
        """Forget every row and every text."""
        for row in tuple(self.kept):
            self._drop(row)
        self.target.reset()

    def _start_request(self, req: Request) -> None:
        self._clock += 1
        found, is_new = None, not req.stats.preemptions
        if self.reuses_prefixes and req.row_scope is not None and not req.is_scored:
            found = self._find_longest(req)
            if is_new:
                req.stats.cached_tokens = 0
                self.counts.queries += req.num_prompt_tokens
        is_continued = self._make_room(req, found)
        if found is None:
            self._vacate(req.row)
            self.memory.reserve(req)
            return
        if found.kept is not None:
            found.kept.used = self._clock
        source = found.row
        if is_continued and source == req.row:
            del self.kept[source]
        elif is_continued:
            self._take(source, req.row, found.reused)
            source = req.row
        elif (place := self._vacate(req.row, but=source)) is not None and source == req.row:
            source = place
        self.memory.reserve(req)
        if source == NO_ROW and self.stored is not None:
            self.stored.put(req)
        elif source != req.row:
            self.target.copy_row(source, req.row, found.reused)
            self.drafter.copy_row(source, req.row, found.drafts)
            self.counts.copied += found.reused
        self.target.resume_row(req.row, found.reused)
        self.drafter.adopt(req, found.drafts, found.reused)
        if is_new:
            req.stats.cached_tokens = found.reused
            self.counts.hits += found.reused

    def _make_room(self, req: Request, found: PrefixMatch | None) -> bool:
        """Kept texts go until a request fits, cheap ones first; whether it goes on from the row of ``found`` itself.

        A text that it continues is kept again when it ends; one that would lose more of its own stays, where there is
        memory for both.
        """
        is_continued = found is not None and found.can_continue_in_place
        room = self.memory.count_bytes_left(req, [other.row for other in self.running if other is not req])
        if room is None:
            return is_continued
        others = [row for row in self.kept if found is None or row != found.row]
        room -= self.memory.bytes_of(self.kept if not is_continued else others)
        if room < 0:
            for row in sorted(others, key=lambda row: self.kept.rank_text(self.kept[row], row)):
                if room >= 0 or self.kept[row].is_pinned:
                    break
                room += self.memory.bytes_of([row])
                self._drop(row)
        may_lose = found is not None and found.kept is not None and not found.kept.is_pinned
        return is_continued or (room < 0 and may_lose)

    def _find_longest(self, req: Request) -> PrefixMatch | None:
        """What a request would go on from; None if no row has enough of its text."""
        prompt = np.asarray(req.tokens, np.int64)
        best: PrefixMatch | None = None
        for row, least, kept, tokens, drafts in self._iter_texts(req):
            common = count_common(prompt, tokens)
            reused = min(common, len(prompt) - 1)  # the last token is read again: its logits are wanted
            if reused < least or (best is not None and reused < best.reused):
                continue
            given = self.drafter.snapshot(drafts) if isinstance(drafts, Request) else drafts
            reused = self.drafter.usable(req, given, reused)
            # Of equal ones, that in its own row: nothing is copied.
            is_better = best is None or (reused, row == req.row) > (best.reused, best.row == req.row)
            if reused >= least and is_better:
                best = PrefixMatch(common, reused, row, given, kept)
        return best

    def _iter_texts(self, req: Request) -> Iterator[tuple[int, int, KeptText | None, Int64Array, Any]]:
        """Of every text that a request may go on from: row, least tokens, what is kept, tokens, what the drafter has.

        What was read from a file has no row yet.
        """
        for row, kept in self.kept.items():
            if kept.scope == req.row_scope:
                yield row, max(MIN_REUSED, self.target.min_reusable_len(row)), kept, kept.tokens, kept.drafts
        for other in self.running:
            count = self.num_read(other)
            if other is not req and count and other.row_scope == req.row_scope:
                tokens = np.asarray(other.tokens[:count], np.int64)
                yield other.row, max(MIN_REUSED, self.target.min_reusable_len(other.row)), None, tokens, other
        if self.stored is not None and (text := self.stored.text_of(req)) is not None:
            drafts = self.drafter.restored(self.stored.entries(req, text))
            yield NO_ROW, text.rows[0].min_reusable_len, None, text.tokens, drafts

    def _move(self, source: int, destination: int) -> None:
        """A request's caches go to another row; a text that is kept there takes the place of them."""
        kept = self.kept.pop(destination, None)
        if kept is not None:
            self._swap(source, destination, (self.target.kv.kv_len(source), len(kept.tokens)), None, kept)
            return
        self.target.move_row(source, destination)
        self.drafter.move_row(source, destination)
        self.memory.swap(source, destination)

    def _take(self, source: int, row: int, count: int) -> None:
        """The first tokens of what ``source`` has are in ``row`` now, and it is no longer kept; what ``row`` had is."""
        taken, homeless = self.kept.pop(source), self.kept.pop(row, None)
        self.memory.free(source)
        self._swap(source, row, (count, 0 if homeless is None else len(homeless.tokens)), taken, homeless)

    def _vacate(self, row: int, but: int | None = None) -> int | None:
        """What is kept in a row goes elsewhere, at the cost of what is worth less; ``but`` is not to be touched.

        Returns where it is now; None if nothing was kept, or if it was forgotten: the row's memory has its entries
        still.
        """
        kept = self.kept.get(row)
        if kept is None:
            return None
        taken = {req.row for req in self.running} | {row} | self.kept.keys()
        # From the end: requests fill the rows from the front.
        place = next((at for at in reversed(range(self.target.kv.num_rows)) if at not in taken), None)
        if place is None and (place := self.kept.find_cheaper_row(kept, (row, but))) is not None:
            self._drop(place)
        if place is None:
            self._drop(row)
            return None
        del self.kept[row]
        self._swap(row, place, (len(kept.tokens), 0), kept, None)
        self.kept[place] = kept
        return place

    def _swap(
        self, one: int, other: int, counts: tuple[int, int], of_one: KeptText | None, of_other: KeptText | None
    ) -> None:
        """Exchange two rows, ``counts`` tokens of each; what was kept in the second is kept in the first then.

        If nothing is of the first, a request runs there, and goes on in the second.
        """
        self.target.swap_rows(one, other, counts)
        if of_one is None:
            self.target.kv.move(one, other)
        self.drafter.swap_rows(one, other, (of_one and of_one.drafts, of_other and of_other.drafts))
        self.memory.swap(one, other)
        if of_other is not None:
            self.kept[one] = of_other
        self.counts.copied += counts[1] if of_one is None else sum(counts)

    def _drop(self, row: int) -> None:
        """Forget the text of a row."""
        del self.kept[row]
        self.memory.free(row)

    def load(self, num_waiting: int) -> EngineLoad:
        """How busy they are; may be asked from any thread."""
        kv, running = self.target.kv, self.running
        return EngineLoad(
            num_running=len(running),
            num_waiting=num_waiting,
            max_num_seqs=self.max_num_seqs,
            kv_entries=kv.num_committed,
            kv_capacity=self.max_num_seqs * kv.capacity,
            num_prefixes=len(self.kept),
            prefix_entries=self.kept.num_entries,
            kv_bytes_resident=self.memory.resident_bytes,
            kv_bytes_reserved=self.memory.bytes_of(self._reserved_by(running)),
            kv_bytes_budget=self.memory.limit,
        )

    def check(self) -> None:
        """Assert the invariants between rounds; SpecexportError if a row number or a cache length is wrong."""
        kv, running = self.target.kv, self.running
        kv.check()
        if len(self.placed) > self.max_num_seqs or set(self._arrivals) != {id(req) for req in running}:
            raise SpecexportError(f"{len(running)} requests run in {len(self.placed)} of {self.max_num_seqs} rows.")
        for row in range(self.max_num_seqs):
            req, kv_len = self.placed[row] if row < len(self.placed) else None, kv.kv_len(row)
            if req is None and kv_len:
                raise SpecexportError(f"row {row} has no request but {kv_len} committed entries.")
            if req is not None and (req.row != row or kv_len >= len(req.tokens)):
                raise SpecexportError(
                    f"row {row} holds request {req.index} (row {req.row}) with kv_len {kv_len} "
                    f"for {len(req.tokens)} tokens."
                )
        self.memory.check()
        for row in self.kept:
            if any(req.row == row for req in running) or kv.kv_len(row):
                raise SpecexportError(f"row {row} is kept for later and in use.")
