"""Who is next: by priority, then the owners in turns, then by arrival.

::

    priority -1:   owner a:  7
    priority  0:   owner b:  3  4  9        b has a row, c has none: c is next; then b and c by turns
                   owner c:  8
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from specexport_runtime.sequences.sequence import Sequence


class WaitingQueue:
    """Sequences without a cache row.

    The lowest priority number goes first. Of equal ones the owner that holds the fewest rows does: max-min fairness of
    rows, so that how much an owner has waiting delays no other. Owners that hold equally many take turns. Within an
    owner the order is that of arrival; who was paused is in front.
    """

    def __init__(self) -> None:
        # Owners in the order of their turns: a dict keeps it.
        self._levels: dict[int, dict[str, deque[Sequence]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, priority by priority and owner by owner."""
        for priority in sorted(self._levels):
            for queue in self._levels[priority].values():
                yield from queue

    def append(self, seq: Sequence) -> None:
        """A sequence has arrived."""
        self._queue_of(seq).append(seq)
        self._count += 1

    def put_back(self, seq: Sequence) -> None:
        """A sequence was paused: it goes on before those of its owner that have not begun."""
        self._queue_of(seq).appendleft(seq)
        self._count += 1

    def is_alike(self, seq: Sequence) -> bool:
        """Whether all have the owner and the priority of ``seq``: then there is nobody to be fair to."""
        return self._count == len(self._levels.get(seq.priority, {}).get(seq.owner, ()))

    def next(self, held: Mapping[str, int], skipped: Collection[str] = ()) -> Sequence | None:
        """The next sequence, which stays in the queue; None if no owner of the first priority is left.

        ``held`` counts the rows of each owner; an owner that it does not name holds none. ``skipped`` owners are passed
        over.
        """
        if not self._count:
            return None
        owners = self._levels[min(self._levels)]
        able = [owner for owner in owners if owner not in skipped]
        # Of equals `min` takes the first: the one whose turn is the longest ago.
        return owners[min(able, key=lambda owner: held.get(owner, 0))][0] if able else None

    def take(self, seq: Sequence) -> None:
        """A sequence gets a row; its owner has had a turn."""
        owners = self._levels[seq.priority]
        queue = owners.pop(seq.owner)
        owners[seq.owner] = queue
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence leaves the queue."""
        owners = self._levels[seq.priority]
        queue = owners[seq.owner]
        queue.remove(seq)
        self._count -= 1
        if not queue:
            del owners[seq.owner]
            if not owners:
                del self._levels[seq.priority]

    def _queue_of(self, seq: Sequence) -> deque[Sequence]:
        return self._levels.setdefault(seq.priority, {}).setdefault(seq.owner, deque())
