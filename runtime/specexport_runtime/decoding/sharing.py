"""How prompts share the tokens of a step: by urgency, equally among owners, and within an owner the oldest first.

The oldest prompt of all always gets a quarter of them, so that whatever is more urgent cannot starve it. The first
token of an owner who has nothing else does not wait for a round of others, if these had the step before.

A row of logits is as long as the vocabulary, so that a chunk of usual length would take hundreds of megabytes of them.
Prompts that are scored are read in short chunks, few at a time.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specexport_runtime.sequences.sequence import Sequence

_OLDEST_SHARE = 4
MOST_SCORED = 64
"""Tokens of a step that are scored."""


class Reading(NamedTuple):
    """A prompt that is being read, or a text that is read again."""

    sequence: Sequence
    most: int  # tokens that its next chunk has at most
    unread: int  # tokens that are left
    is_late: bool = False  # it yields to readings that are not


def share_tokens(readings: Seq[Reading], tokens: int) -> dict[int, int]:
    """Tokens of each row in this step, for rows that get any, in the order of ``readings``: the oldest first.

    The oldest gets one token at least.
    """
    if not readings:
        return {}
    oldest, given = readings[0], dict.fromkeys([each.sequence.row for each in readings], 0)
    given[oldest.sequence.row] = max(1, min(oldest.most, tokens // _OLDEST_SHARE))
    left = tokens - given[oldest.sequence.row]
    for urgency in sorted({_urgency(each) for each in readings}):
        owners: dict[str, list[Reading]] = {}
        for each in readings:
            if _urgency(each) == urgency:
                owners.setdefault(each.sequence.owner, []).append(each)
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
    """Prompt tokens of each row, cut such that the rows ``scored`` have no more than ``MOST_SCORED`` in a step."""
    left, bounded = MOST_SCORED, {}
    for row, count in chunks.items():
        if row not in scored:
            bounded[row] = count
        elif left:
            bounded[row] = min(count, left)
            left -= bounded[row]
    return bounded


def go_alone(ready: Seq[Sequence], ending: Seq[Sequence]) -> list[Sequence]:
    """Sequences of ``ending``, whose prompt ends in the step, whose first token should not wait for a round of others.

    They have a step for themselves; who decodes (``ready``) sits it out, which changes no draw. Only for owners of whom
    nothing decodes, and for sequences that are more urgent than all that do.
    """
    if not ready:
        return []
    owners, most_urgent = {seq.owner for seq in ready}, min(seq.priority for seq in ready)
    return [seq for seq in ending if (seq.priority, seq.owner in owners) < (most_urgent, True)]


def _urgency(reading: Reading) -> tuple[int, bool]:
    return reading.sequence.priority, reading.is_late


def _given(readings: Seq[Reading], given: Mapping[int, int]) -> int:
    return sum(given[each.sequence.row] for each in readings)


def _fill(readings: Seq[Reading], tokens: int, given: dict[int, int]) -> int:
    """Give tokens to the prompts of one owner, one after the other; how many were given."""
    left = tokens
    for each in readings:
        row = each.sequence.row
        more = min(each.most - given[row], left)
        given[row] += more
        left -= more
    return tokens - left
