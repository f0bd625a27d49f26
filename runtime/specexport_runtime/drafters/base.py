"""What the decoding loop needs from a drafter: proposals, and news of what became of them."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from specexport_runtime.sequences.records import Proposal

if TYPE_CHECKING:
    from specexport_runtime.executors.base import Float32Array
    from specexport_runtime.sequences.sequence import Sequence


class Drafter(Protocol):
    """A way to guess the next tokens of many sequences. Guesses change speed, never the output's distribution."""

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside engine execution since creation; 0 for drafters without an engine."""
        ...

    def propose(self, sequences: "Seq[Sequence]", lookaheads: Seq[int]) -> list[Proposal]:
        """Up to ``lookaheads[i]`` draft tokens for each sequence. 0 must return an empty proposal."""
        ...

    def commit(self, sequences: "Seq[Sequence]") -> None:
        """Called after every round: the sequences' tokens now end with what was committed; forget the rest."""
        ...

    def move_row(self, source: int, destination: int) -> None:
        """A sequence moved between cache rows; move any state kept for that row."""
        ...

    def release_row(self, row: int) -> None:
        """The sequence of ``row`` is done; drop any state kept for it."""
        ...

    def wants_similarity(self, sequence: "Sequence") -> bool:
        """Whether the target should measure attention similarity while it reads this sequence's prompt."""
        ...

    def note_similarity(self, sequence: "Sequence", similarity: "Float32Array") -> None:
        """Attention similarity [N, t] of the ``t`` prompt tokens that the target has just read."""
        ...
