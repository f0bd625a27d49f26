"""Whether the texts are those of plain greedy decoding."""

from collections.abc import Sequence as Seq
from itertools import zip_longest


class TextCheck:
    """Counts the texts of one bundle that differ from plain decoding's.

    Attributes:
        compared: texts.
        different: of these, the ones that differ.
        first: where the first of them does, for a reader; None if there is none.
    """

    def __init__(self) -> None:
        self.compared = self.different = 0
        self.first: str | None = None

    def compare(self, tokens: Seq[int], plain: Seq[int], what: str) -> None:
        """Count one text.

        Args:
            tokens: its ids.
            plain: those of plain greedy decoding.
            what: how it was made, for a reader.
        """
        self.compared += 1
        differing = (i for i, (a, b) in enumerate(zip_longest(tokens, plain)) if a != b)
        position = next(differing, None)
        if position is not None:
            self.different += 1
            self.first = self.first or f"at token {position} ({what})"

    def to_json(self) -> dict[str, int]:
        """JSON form."""
        return {"compared": self.compared, "different": self.different}
