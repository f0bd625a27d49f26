"""Drafting with Medusa heads: each guesses one place of the draft, all from one hidden state (Cai et al. 2024).

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought behind each
    draft:                               0 1 2  head i reads fd and guesses the i-th token behind e

So the target's last feature is all that is ever read: there is no cache, and nothing to catch up on. A draft is one
step, a row for each wanted place. Its token is the number of the head, which reads no other rows. Each guess is drawn
from what its head says, whatever the guesses before it are: that is the distribution that is tested against.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from specexport_runtime.drafters.at_once import AtOnce
from specexport_runtime.drafters.base import HEAD, DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft, draft_at_once, open_drafts
from specexport_runtime.drafters.last_feature import LastFeatureDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sequences.records import Begun, Proposal
from specexport_runtime.sequences.sequence import Sequence

DEFAULT_MEDUSA_LOOKAHEAD = 4
"""K where nothing else is asked for, if there are so many heads: each guesses less well than the one before."""


class MedusaDrafter(LastFeatureDrafter):
    """Draft tokens from Medusa heads over the target's last feature.

    Their engine has no cache; the base class has all the same what else such drafters need. ``named``: see
    ``OwnCacheDrafter``. SpecexportError: the runner's engine is not of Medusa heads.
    """

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        head = as_head(runner.executor)
        self.num_heads = 0 if head is None else head.num_draft_heads
        if not self.num_heads:
            raise SpecexportError("the Medusa drafter needs the engine of Medusa heads.")
        self.traits = DrafterTraits(
            default_lookahead=min(DEFAULT_MEDUSA_LOOKAHEAD, self.num_heads),
            can_exit=True,
            max_lookahead=self.num_heads,
            goes_on=True,
        )

    def propose(
        self, sequences: Seq[Sequence], lookaheads: Seq[int], begun: Seq[Begun] | None = None
    ) -> list[Proposal]:
        """Draft up to ``lookaheads[i]`` tokens for each sequence, at most one a head; see ``Drafter.propose``.

        Behind tokens that are there already come the guesses of the heads for the places behind them.
        """
        drafts = open_drafts(sequences, lookaheads, begun, most=self.num_heads, one_by_one=True)
        if opened := [draft for draft in drafts if draft.is_open]:
            work = [self._asked(draft) for draft in opened]
            draft_at_once(self.runner, opened, work, self.vocab_size, self._head)
        return [draft.proposal(HEAD) for draft in drafts]

    def _asked(self, draft: Draft) -> AtOnce:
        """A row for each head that is asked, with the feature of the token before the newest."""
        features = np.tile(self._last.of(draft.sequence), (draft.limit, 1))
        return AtOnce(RowWork(range(draft.limit), draft.limit, features), 0)
