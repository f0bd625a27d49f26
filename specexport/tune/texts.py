"""Whether the texts are those of plain greedy decoding."""

from collections.abc import Sequence as Seq
from itertools import zip_longest


class TextCheck:
    """Counts the texts of one bundle that differ from plain decoding's."""

    def __init__(self) -> None:
        self.compared = self.different = 0
        self.first: str | None = None  # where the first text that differs does, for a reader; None if there is none

    def compare(self, tokens: Seq[int], plain: Seq[int], what: str) -> None:
        """Count one text: its token ids against plain greedy decoding's; ``what`` tells a reader how it was made."""
        self.compared += 1
        differing = (i for i, (a, b) in enumerate(zip_longest(tokens, plain)) if a != b)
        position = next(differing, None)
        if position is not None:
            self.different += 1
            self.first = self.first or f"at token {position} ({what})"

    def to_json(self) -> dict[str, int]:
        """JSON form."""
        return {"compared": self.compared, "different": self.different}
