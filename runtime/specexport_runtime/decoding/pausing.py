"""Whom to pause so that another need not wait for a row, which may take as long as the longest text.

A paused sequence loses its row and nothing else: it reads what it had again, or finds it in a row that was free to keep
it, and goes on with the same text (``Sequence.reads_again``). That costs time, so no sequence is paused

- for another sequence of the same owner, unless that one has a higher priority (a lower number);
- while its owner holds no more rows than the other would then: with two rows or more over the other's, at once; with
  one over an owner that has none, when it has had a turn as long as its text;
- again before it has generated a quarter of what it would have to read again;
- within a few tokens of its end, or while its prompt is scored.

So with one owner, and one priority, no sequence is ever paused.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from specexport_runtime.sequences.sequence import Sequence

LEAST_TURN = 16
"""Tokens that a sequence generates before it is paused again; a quarter of its text, if that is more."""
WHOLE_TURN = 256
"""The same where owners share a row in turns; the whole of its text, if that is more."""
NEARLY_DONE = 8
"""Tokens before its end, within which a sequence is left alone."""


def whom_to_pause(
    newcomer: Sequence,
    running: Seq[Sequence],
    num_read: Callable[[Sequence], int],  # tokens of a sequence that the target has read
    can_resume: Callable[[Sequence], bool] = lambda _: True,  # whether a sequence can go on when it was paused
) -> Sequence | None:
    """The sequence whose row another had better have; None if none may be paused.

    It is one of the lowest priority, of the owner with the most rows, with the least to read again.
    """
    held = Counter(seq.owner for seq in running)

    def may_be(seq: Sequence) -> bool:
        if seq.priority < newcomer.priority or not _is_rested(seq, num_read(seq)):
            return False
        if seq.priority == newcomer.priority:
            if seq.owner == newcomer.owner:
                return False
            more = held[seq.owner] - held[newcomer.owner]
            if more < 2 and not (more == 1 and not held[newcomer.owner] and _has_had_its_turn(seq, num_read(seq))):
                return False
        return can_resume(seq)

    able = [seq for seq in running if may_be(seq)]
    return max(able, key=lambda seq: (seq.priority, held[seq.owner], -num_read(seq)), default=None)


def _is_rested(seq: Sequence, num_read: int) -> bool:
    """Whether a sequence may be paused at all."""
    is_ending = seq.num_generated > 0 and seq.room_for_drafts < NEARLY_DONE
    if is_ending or seq.is_pinned or seq.is_scored or seq.reads_again:
        return False
    return not seq.stats.preemptions or seq.num_since_pause >= max(LEAST_TURN, num_read // 4)


def _has_had_its_turn(seq: Sequence, num_read: int) -> bool:
    return seq.num_since_pause >= max(WHOLE_TURN, num_read)
