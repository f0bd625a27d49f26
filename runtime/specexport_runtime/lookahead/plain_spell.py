"""Rounds in which nobody drafts, and nobody need be asked: a useless drafter must cost next to nothing."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from specexport_runtime.lookahead.memory import StageMemory
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
        self._members: WeakSet[Sequence] = WeakSet()

    def holds(self, now: int, sizes: tuple[int, ...], sequences: "Seq[Sequence]") -> bool:
        """Whether nobody need be asked in this round.

        Args:
            now: number of the round.
            sizes: of the step before drafting.
            sequences: all that decode in it.
        """
        if now >= self._until or sizes != self._sizes:
            return False
        members = self._members
        return all(seq in members for seq in sequences)

    def begin(
        self,
        now: int,
        sizes: tuple[int, ...],
        sequences: "Seq[Sequence]",
        stage_of: "Callable[[Sequence, str], StageMemory | None]",
    ) -> None:
        """All were asked in round ``now``, and nobody drafts.

        No spell begins where one must be asked in every round: text to copy may turn up in any; a trace has every
        round; and a sequence whose prompt has just ended has not been asked yet.

        Args:
            now: number of the round.
            sizes: of the step before drafting.
            sequences: all that decode in it.
            stage_of: what is remembered of a sequence and a drafter; None where the drafter must be asked every time.
        """
        until = now + _LONGEST
        for seq in sequences:
            if not seq.adaptive or seq.trace is not None or not seq.num_generated:
                return
            for name, _ in seq.draft_plan:
                stage = stage_of(seq, name)
                if stage is None:
                    return
                until = min(until, max(stage.timer.due, now + _REFUSED))
        self._until, self._sizes, self._members = until, sizes, WeakSet(sequences)
