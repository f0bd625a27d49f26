"""Continuous batching: who runs, and how the tokens of a step are shared.

Requests hold rows 0 … n-1 (``slots``). Who is next and who gives way says ``queue``. Prompts share a step by urgency,
equally among owners, and within an owner the oldest comes first. The oldest prompt of all always gets a quarter of
them, so that whatever is more urgent cannot starve it. The first token of an owner who has nothing else does not wait
for a round of others, if these had the step before.

A row of logits is as long as the vocabulary, so that a chunk of usual length would take hundreds of megabytes of them.
Prompts that are scored are read in short chunks, few at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.queue import WaitingQueue, find_request_to_pause
from specexport_runtime.decoding.rows import Slots
from specexport_runtime.requests.request import NO_ROW, Request

_OLDEST_SHARE = 4
MAX_SCORED = 64
"""Tokens of a step that are scored."""

REREAD_CHUNK = 32
"""Tokens that a paused request reads again in a step, at most, since all others wait for the step; no more than
``min_prefill_tokens`` where one of them waits for its first token."""


class PromptReading(NamedTuple):
    """A prompt that is being read, or a text that is read again."""

    request: Request
    most: int  # tokens that its next chunk has at most
    unread: int  # tokens that are left
    is_late: bool = False  # it yields to readings that are not


def share_tokens(readings: Sequence[PromptReading], tokens: int) -> dict[int, int]:
    """Tokens of each row in this step, in the order of ``readings``: the oldest first, which gets one at least."""
    if not readings:
        return {}
    oldest, given = readings[0], dict.fromkeys([each.request.row for each in readings], 0)
    given[oldest.request.row] = max(1, min(oldest.most, tokens // _OLDEST_SHARE))
    left = tokens - given[oldest.request.row]
    for urgency in sorted({_urgency(each) for each in readings}):
        owners: dict[str, list[PromptReading]] = {}
        for each in readings:
            if _urgency(each) == urgency:
                owners.setdefault(each.request.owner, []).append(each)
        # Who needs less than an equal part leaves the rest to the others.
        groups = sorted(owners.values(), key=lambda group: sum(each.unread for each in group))
        for number, group in enumerate(groups):
            there = left + sum(_given(each, given) for each in groups[number:])
            equal = there // (len(groups) - number) - _given(group, given)
            left -= _fill(group, max(min(left, equal), 0), given)
        for group in groups:  # what the last of them may not read yet
            left -= _fill(group, max(left, 0), given)
    return {row: count for row, count in given.items() if count}


def bound_scored(chunks: Mapping[int, int], scored: Collection[int]) -> dict[int, int]:
    """Prompt tokens of each row, cut such that the rows ``scored`` have no more than ``MAX_SCORED`` in a step."""
    left, bounded = MAX_SCORED, {}
    for row, count in chunks.items():
        if row not in scored:
            bounded[row] = count
        elif left:
            bounded[row] = min(count, left)
            left -= bounded[row]
    return bounded


def select_to_go_alone(ready: Sequence[Request], ending: Sequence[Request]) -> list[Request]:
    """Requests of ``ending`` that have a step for themselves, so that a first token waits for no round.

    Only owners of whom nothing decodes, and requests that are more urgent than all ``ready``; no draw changes.
    """
    if not ready:
        return []
    owners, most_urgent = {req.owner for req in ready}, min(req.priority for req in ready)
    return [req for req in ending if (req.priority, req.owner in owners) < (most_urgent, True)]


def _urgency(reading: PromptReading) -> tuple[int, bool]:
    return reading.request.priority, reading.is_late


def _given(readings: Sequence[PromptReading], given: Mapping[int, int]) -> int:
    return sum(given[each.request.row] for each in readings)


def _fill(readings: Sequence[PromptReading], tokens: int, given: dict[int, int]) -> int:
    """Give tokens to the prompts of one owner, one after the other; how many were given."""
    left = tokens
    for each in readings:
        row = each.request.row
        more = min(each.most - given[row], left)
        given[row] += more
        left -= more
    return tokens - left


class Scheduler:
    """Gives rows to requests that are next, and the tokens of a step to requests that hold a row."""

    def __init__(
        self,
        slots: Slots,
        *,
        max_num_batched_tokens: int,  # of one step; requests that decode always get theirs, prompts share what is left
        min_prefill_tokens: int = 16,  # prompts get these even if nothing is left, so that they cannot starve
        pace: Pace | None = None,
    ) -> None:
        target = slots.target
        self.slots, self.waiting = slots, WaitingQueue()
        self._limit = target.executor.max_num_tokens  # of a step of the engine; None for no limit
        self.max_num_batched_tokens = min(max_num_batched_tokens, self._limit or max_num_batched_tokens)
        self.min_prefill_tokens = min_prefill_tokens
        self._pace = pace or Pace()
        # Padding a whole batch to the width of a prompt chunk helps no request: the padded method prefills apart.
        self._mixes_prefill = target.unpad_kv and target.unpad_input
        self._sat_out = False
        self.failed: list[Request] = []  # that the last plan ended: an exception concerned one alone

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or any(self.slots.placed)

    def retire(self, req: Request) -> None:
        """A request gives its row back, or its place in the queue."""
        self.slots.forget_stored(req)
        if req.row == NO_ROW:
            self.waiting.remove(req)
        else:
            self.slots.leave(req)

    def plan(self) -> tuple[list[Request], dict[int, int]]:
        """Admit what fits; then the requests that decode in this step, and the prompt tokens of the other rows."""
        placed, self.failed = self.slots.placed, []
        ready = [req for req in placed if req is not None and req.is_decoding]
        if len(ready) == len(placed) and not (self.waiting and self._can_admit()):
            return ready, {}  # most rounds: all requests decode, and none can come
        self.admit_waiting(_count_most_tokens(ready))
        running = self.slots.running
        ready = [req for req in running if req.is_decoding]
        busy = _count_most_tokens(ready)
        if self._limit is not None:  # a request with one token to read drafts after it
            busy += _count_most_tokens(
                [req for req in running if not req.is_decoding and self.slots.num_unread(req) == 1]
            )
        # An engine of fixed sizes takes a whole verify step, but maybe not the smallest prompt chunk beside it.
        if self._mixes_prefill and (self._limit is None or busy + self.min_prefill_tokens <= self._limit):
            chunks = self.share(busy)
            alone = [] if self._sat_out else select_to_go_alone(ready, self.slots.ending(chunks))
            self._sat_out = bool(alone)
            return ([], {req.row: chunks[req.row] for req in alone}) if alone else (ready, chunks)
        chunks = self.share(0)
        return ([], dict([next(iter(chunks.items()))])) if chunks else (ready, chunks)

    def admit_waiting(self, busy_tokens: int) -> None:
        """Admit what fits, then close the holes that are left; requests that decode may take ``busy_tokens``.

        A request is admitted when a row is free, or can be made free, and the step still has budget for its prompt. If
        there is no memory for it, it waits, and all after it but some of other owners. What raises before
        a row is touched ends that request.
        """
        slots, passed = self.slots, set[str]()
        while (req := self.waiting.next(slots.held, passed)) is not None:
            row, victim = slots.free_row, None
            try:
                if not self._has_budget(req, busy_tokens):
                    passed.add(req.owner)
                    continue
                if row == NO_ROW and (victim := self._find_victim(req)) is None:
                    break
                if slots.should_wait(req):
                    passed.add(req.owner)
                    continue
                if not slots.fits(req):
                    if not self.waiting.can_be_passed(req):
                        break
                    passed.add(req.owner)
                    continue
            except Exception as error:  # of a drafter that is asked what it could go on from, say
                self._end(req, error)
                continue
            if victim is not None:
                row = slots.pause(victim)
                self.waiting.put_back(victim)
                try:
                    slots.drafter.restart(victim)
                except Exception as error:
                    self._end(victim, error)
            self.waiting.take(req)
            slots.admit(req, row)
        slots.close_holes()

    def _end(self, req: Request, error: Exception) -> None:
        """An exception ends a request that waits, and no other."""
        self.waiting.remove(req)
        req.end("error", error)
        self.failed.append(req)

    def share(self, busy_tokens: int) -> dict[int, int]:
        """Prompt tokens of each row in this step beside ``busy_tokens``, for rows that get any, the oldest first."""
        reads, most = self.slots.reading, self.slots.target.max_chunk
        if not reads:
            return {}
        is_awaited = any(not req.reads_again for req in reads)
        again = min(self.min_prefill_tokens if is_awaited else REREAD_CHUNK, most)
        readings = [self._make_reading(req, again if req.reads_again else most) for req in reads]
        num_decoding = len(self.slots.running) - len(reads)
        left = self._pace.most(self.max_num_batched_tokens - busy_tokens, num_decoding)
        chunks = share_tokens(readings, max(left, self.min_prefill_tokens))
        chunks = bound_scored(chunks, [req.row for req in reads if req.is_scored])
        if self._limit is not None:  # a prompt's end has a draft after it: the last token waits where it does not fit
            left = self._limit - busy_tokens - sum(chunks.values())
            for req in [each for each in self.slots.ending(chunks) if chunks[each.row] > 1]:
                drafts = _count_most_tokens([req]) - 1
                waits = drafts > left
                chunks[req.row] -= waits
                left += 1 if waits else -drafts
        return chunks

    def _make_reading(self, req: Request, wanted: int) -> PromptReading:
        """What a request has to read: up to ``wanted`` tokens now."""
        unread = self.slots.num_unread(req) - req.reads_again
        return PromptReading(req, min(unread, wanted), unread, self._pace.is_late(req, unread))

    def _can_admit(self) -> bool:
        """Whether a row is free for a request that waits, or may be made free."""
        return self.slots.free_row != NO_ROW or self._find_victim(None) is not None

    def _has_budget(self, req: Request, busy_tokens: int) -> bool:
        """Whether a request would get tokens now: others read before it, but for owners with whom it shares."""
        before = [
            self.slots.num_unread(each)
            for each in self.slots.reading
            if each.priority < req.priority or (each.priority == req.priority and each.owner == req.owner)
        ]
        return not before or self.max_num_batched_tokens - busy_tokens > sum(before)

    def _find_victim(self, req: Request | None) -> Request | None:
        """Whom to pause for a request, or for the next that waits."""
        if all(each is None or self.waiting.has_only_peers_of(each) for each in self.slots.placed):
            return None
        req = req or self.waiting.next(self.slots.held)
        return req and find_request_to_pause(req, self.slots)


def _count_most_tokens(ready: Sequence[Request]) -> int:
    """Tokens that requests with one token to read may take in a step."""
    return sum([1 + min(req.room_for_drafts, req.max_lookahead) for req in ready])
