"""Rounds in which nobody drafts, and nobody need be asked: a useless drafter must cost next to nothing."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

_LONGEST = 64
"""Rounds after which all are asked again anyway: contexts grow, and with them what a step costs."""
_REFUSED = 4
"""Rounds after which a probe that is due, and that the budget refused, is asked for again."""


class PlainSpell:
    """Remembers that nobody drafts, until a probe is due or the step has other sizes or sequences."""

    def __init__(self) -> None:
        self._until = 0
        self._sizes: tuple[int, ...] = ()
        self._mark = object()

    def holds(self, now: int, sizes: tuple[int, ...], sequences: "Seq[Sequence]") -> bool:
        """Whether nobody need be asked in this round.

        Args:
            now: number of the round.
            sizes: of the step before drafting.
            sequences: all that decode in it.
        """
        if now >= self._until or sizes != self._sizes:
            return False
        mark = self._mark
        return all(seq.plain_spell is mark for seq in sequences)

    def begin(self, now: int, sizes: tuple[int, ...], sequences: "Seq[Sequence]") -> None:
        """All were asked in round ``now``, and nobody drafts.

        No spell begins where one must be asked in every round: text to copy may turn up in any; a trace has every
        round; and a sequence whose prompt has just ended has not been asked yet.
        """
        until = now + _LONGEST
        for seq in sequences:
            if not seq.adaptive or seq.trace is not None or not seq.num_generated:
                return
            for name, _ in seq.draft_plan:
                stage = (seq.length_state or {}).get(name)
                if name == "lookup" or stage is None:
                    return
                until = min(until, max(stage.timer.due, now + _REFUSED))
        self._until, self._sizes, self._mark = until, sizes, object()
        for seq in sequences:
            seq.plain_spell = self._mark
