"""What the decoding loop needs from a drafter: proposals, and news of what became of them."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from specexport_runtime.executors.base import Float32Array
    from specexport_runtime.sampling import Distribution
    from specexport_runtime.sequence import Sequence

DraftEnd = Literal["lookahead", "exit", "text", "none"]
"""Why a draft ended: K was reached, the drafter was not sure any more, nothing more to copy, or no draft at all."""


class Proposal(NamedTuple):
    """Draft tokens for one sequence.

    Attributes:
        tokens: the draft tokens, in order; empty for plain decoding.
        distributions: the distribution each token was drawn from; None says one-hot (greedy, or copied text).
        end: why the draft has no more tokens.
        drafter: name of the drafter in the draft plan; empty if none was asked or none found anything.
        match_length: of a copied draft, how many tokens before it matched; 0 for drafts of models.
    """

    tokens: list[int]
    distributions: "list[Distribution] | None" = None
    end: DraftEnd = "lookahead"
    drafter: str = ""
    match_length: int = 0


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
