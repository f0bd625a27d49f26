"""Sizes of the steps that a draft head runs between two rounds: what engines with fixed sizes are built for.

A row of such a step has the entries whose features the head has not read, and behind them stand-ins for tokens that
are not known yet (see ``drafters.at_once``)::

                       not read    stand-ins                 logits
    token by token     1 … K+1     none                      1        then one entry a step
    P-EAGLE            1 … K+1     K-1 masks                 K
    DFlash             1 … K+1     the newest, and K masks   K
    Medusa             none        K numbers of heads        K

After a round up to K+1 features are new: those of the tokens that were accepted. Imports the standard library only.
"""

from typing import NamedTuple


class HeadSteps(NamedTuple):
    """Sizes of a draft head's steps, beside the steps that only read a prompt."""

    fresh: int  # most entries of a row whose features are new
    behind: int  # entries of a row behind these
    logits: int  # rows of logits that a row of the step wants
    steps_alone: bool  # the head drafts token after token, so that most of its steps have one entry a row

    @property
    def width(self) -> int:
        """Most entries of a row."""
        return self.fresh + self.behind

    @property
    def widths(self) -> range:
        """Entries that a row may have, of a draft of K tokens."""
        return range(self.behind + min(self.fresh, 1), self.width + 1)


def head_steps(
    lookahead: int, *, num_draft_heads: int = 0, block_size: int | None = None, has_mask: bool = False
) -> HeadSteps:
    """The steps of a head that drafts up to ``lookahead`` tokens (K); K is less where the head has no more to give.

    ``num_draft_heads`` counts Medusa heads, ``block_size`` is the most tokens of a block (DFlash), and ``has_mask``
    says that the head drafts all tokens in one step.
    """
    if num_draft_heads:
        drafted = min(lookahead, num_draft_heads)
        return HeadSteps(0, drafted, drafted, steps_alone=False)
    if block_size is not None:
        drafted = min(lookahead, block_size - 1)
        return HeadSteps(lookahead + 1, drafted + 1, drafted, steps_alone=False)
    if has_mask:
        return HeadSteps(lookahead + 1, lookahead - 1, lookahead, steps_alone=False)
    return HeadSteps(lookahead + 1, 0, 1, steps_alone=True)
