"""Who gets a row. Next is who has priority, then the owners in turns, then who came first.

::

    priority -1:   owner a:  7
    priority  0:   owner b:  3  4  9        b has a row, c has none: c is next; then b and c by turns
                   owner c:  8

Where no row is free, which may last as long as the longest text, a request may be paused for another. It loses its row
and nothing else: it reads what it had again, or finds it in a row that was free to keep it, and goes on with the same
text (``Request.reads_again``). That costs time, so no request is paused

- for another request of the same owner, unless that one has a higher priority (a lower number);
- while its owner holds no more rows than the other would then: with two rows or more over the other's, at once; with
  one over an owner that has none, when it has had a turn as long as its text;
- again before it has generated a quarter of what it would have to read again;
- within a few tokens of its end, or while its prompt is scored.

So with one owner, and one priority, no request is ever paused.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from specexport_runtime.decoding.rows import Slots
from specexport_runtime.requests.request import Request

MIN_TURN = 16
"""Tokens that a request generates before it is paused again; a quarter of its text, if that is more."""
WHOLE_TURN = 256
"""The same where owners share a row in turns; the whole of its text, if that is more."""
NEARLY_DONE = 8
"""Tokens before its end, within which a request is left alone."""
MAX_PASSES = 16
"""Requests of other owners that begin before one for which there is no memory; then all wait until there is."""


class WaitingQueue:
    """Requests without a cache row.

    The lowest priority number goes first, then the owner with the fewest rows: max-min fairness of rows. Equal owners
    take turns. Within an owner the order is that of arrival, with a paused request in front.
    """

    def __init__(self) -> None:
        # Owners in the order of their turns: a dict keeps it.
        self._levels: dict[int, dict[str, deque[Request]]] = {}
        self._count = 0
        self._passes: dict[Request, int] = {}  # of those that had no memory: requests that began since

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """All of them, priority by priority and owner by owner."""
        for priority in sorted(self._levels):
            for queue in self._levels[priority].values():
                yield from queue

    def append(self, req: Request) -> None:
        """A request has arrived."""
        self._queue_of(req).append(req)
        self._count += 1

    def put_back(self, req: Request) -> None:
        """A request was paused: it goes on before those of its owner that have not begun."""
        self._queue_of(req).appendleft(req)
        self._count += 1

    def has_only_peers_of(self, req: Request) -> bool:
        """Whether all have the owner and the priority of ``req``: then fairness has no say."""
        return self._count == len(self._levels.get(req.priority, {}).get(req.owner, ()))

    def next(self, held: Mapping[str, int], skipped: Collection[str] = ()) -> Request | None:
        """The next request, by how many rows owners have (``held``), but of ``skipped`` ones; None if none is left."""
        if not self._count:
            return None
        owners = self._levels[min(self._levels)]
        able = [owner for owner in owners if owner not in skipped]
        # Of equals `min` takes the first: the one whose turn is the longest ago.
        return owners[min(able, key=lambda owner: held.get(owner, 0))][0] if able else None

    def can_be_passed(self, req: Request) -> bool:
        """Whether requests of other owners may begin before one for which there is no memory now."""
        return self._passes.setdefault(req, 0) < MAX_PASSES

    def take(self, req: Request) -> None:
        """A request gets a row; its owner has had a turn."""
        self._passes = {each: count + 1 for each, count in self._passes.items()}
        owners = self._levels[req.priority]
        queue = owners.pop(req.owner)
        owners[req.owner] = queue
        self.remove(req)

    def remove(self, req: Request) -> None:
        """A request leaves the queue."""
        owners = self._levels[req.priority]
        queue = owners[req.owner]
        queue.remove(req)
        self._passes.pop(req, None)
        self._count -= 1
        if not queue:
            del owners[req.owner]
            if not owners:
                del self._levels[req.priority]

    def _queue_of(self, req: Request) -> deque[Request]:
        return self._levels.setdefault(req.priority, {}).setdefault(req.owner, deque())


def find_request_to_pause(newcomer: Request, slots: Slots) -> Request | None:
    """The request whose row another had better have: lowest priority, most rows, least to read again; None if none."""
    held = slots.held

    def can_pause(req: Request) -> bool:
        num_read = slots.num_read(req)
        if req.priority < newcomer.priority or not _can_be_paused(req, num_read):
            return False
        if req.priority == newcomer.priority:
            if req.owner == newcomer.owner:
                return False
            more, has_none = held[req.owner] - held[newcomer.owner], not held[newcomer.owner]
            if more < 2 and not (more == 1 and has_none and req.num_since_pause >= max(WHOLE_TURN, num_read)):
                return False
        return slots.can_resume(req)

    able = [req for req in slots.running if can_pause(req)]
    return max(able, key=lambda req: (req.priority, held[req.owner], -slots.num_read(req)), default=None)


def _can_be_paused(req: Request, num_read: int) -> bool:
    """Whether a request may be paused at all."""
    is_ending = req.num_generated > 0 and req.room_for_drafts < NEARLY_DONE
    if is_ending or req.is_pinned or req.is_scored or req.reads_again:
        return False
    return not req.stats.preemptions or req.num_since_pause >= max(MIN_TURN, num_read // 4)
