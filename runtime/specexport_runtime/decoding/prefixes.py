"""Kept texts: what prefix reuse goes on from, and which goes first when a row or memory is wanted.

Rows keep the text of requests that ended. A request that is admitted takes the longest common beginning of its prompt
and of any text that a row has: a kept one, or one that runs (its committed entries never change). ``rows`` does the
moving and copying.

The numbers are what reading the prompt would have given: an entry depends on the tokens before it, and engines on a CPU
give a token the same bits in a step of any width; on a GPU they are equal up to rounding, as all steps are there.
Entries are never shifted to other positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specexport_runtime.executors.base import Int64Array

MIN_REUSED = 16
"""Fewer tokens than this are read again: short texts would fill the rows."""
WORTH_WAITING = 64
"""Tokens that another request is about to read, for which one that begins with them too waits a few steps."""
SHORT_TAIL = 32
"""A kept text that is continued loses at most this many of its last tokens; one that would lose more is copied."""


@dataclass
class KeptText:
    """The text of a row that no request runs in."""

    tokens: Int64Array  # [n]; the row has the entries of all of them
    scope: tuple[str, int | None]  # who may go on from it, and with which adapter
    drafts: Any  # what the drafter has of the row
    used: int  # when it was last used, in admissions
    is_pinned: bool = False  # it stays, whatever comes
    placed: int = 0  # how often it was put into a row: whoever copies from there sees that it was moved
    unwritten: int | None = None  # tokens that no file has; None: nobody has looked


class PrefixMatch(NamedTuple):
    """A row whose text begins as a prompt does."""

    common: int
    reused: int
    row: int
    drafts: Any
    kept: KeptText | None

    @property
    def can_continue_in_place(self) -> bool:
        """Whether the text may be continued in place: it is kept again, but for a short tail, when that ends."""
        return self.kept is not None and not self.kept.is_pinned and len(self.kept.tokens) - self.common <= SHORT_TAIL


@dataclass
class PrefixCounts:
    """What prefix reuse did, in tokens, as vLLM counts it."""

    queries: int = 0  # of prompts that were looked up
    hits: int = 0  # of these, not read again
    copied: int = 0  # entries copied from one row to another, for hits and to make room


class KeptTexts(dict[int, KeptText]):
    """The kept texts by row. A text leaves before its row is written to, and comes when that is done."""

    def __setitem__(self, row: int, kept: KeptText) -> None:
        kept.placed += 1
        super().__setitem__(row, kept)

    @property
    def num_entries(self) -> int:
        """Cache entries of all of them; may be asked from any thread."""
        return sum([len(kept.tokens) for kept in tuple(self.values())])

    @property
    def pinned_rows(self) -> list[int]:
        """Rows of texts that are kept for good; may be asked from any thread."""
        return [row for row, kept in tuple(self.items()) if kept.is_pinned]

    def unpin(self, tokens: Sequence[int], scope: str, adapter: int | None = None) -> bool:
        """Let a text that is kept for good go when its row is wanted, from any thread; False if there was none."""
        wanted, found = list(tokens), False
        for kept in tuple(self.values()):
            if kept.is_pinned and kept.scope == (scope, adapter) and kept.tokens.tolist() == wanted:
                kept.is_pinned, found = False, True
        return found

    def rank_text(self, kept: KeptText, at: int | None) -> tuple[bool, bool, int]:
        """Pinned texts are worth the most, beginnings of other texts the least; then older texts."""
        size = len(kept.tokens)
        contained = any(
            other is not kept
            and row != at
            and other.scope == kept.scope
            and len(other.tokens) >= size
            and (other.tokens[:size] == kept.tokens).all()
            for row, other in self.items()
        )
        return kept.is_pinned, not contained, kept.used

    def find_cheaper_row(self, homeless: KeptText, but: Sequence[int | None]) -> int | None:
        """The row, none of ``but``, whose text is worth the least, and less than one without a row; None: none is."""
        worst, place = self.rank_text(homeless, None), None
        for at, kept in self.items():
            if at not in but and not kept.is_pinned and (rank := self.rank_text(kept, at)) < worst:
                worst, place = rank, at
        return place


def count_common(prompt: Int64Array, tokens: Int64Array) -> int:
    """Tokens that two texts have in common from their beginning."""
    size = min(len(prompt), len(tokens))
    different = prompt[:size] != tokens[:size]
    return int(different.argmax()) if different.any() else size
