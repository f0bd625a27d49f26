"""Drafting with Hydra heads: each reads the tokens that those before it guessed (Ankner et al. 2024).

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought behind each
    step 1:       fa.  fb.  fc.  fd,e           the first head reads fd and e, and guesses x
    step 2:                      fd,e  fd,x     the second reads fd, e and x

One step is one token of each draft, as with an EAGLE head, and the first one reads features: they are entries of the KV
cache, if a decoder layer is in front of the heads. A later step is fed all tokens that its head reads, each beside the
hidden state that the first one handed on. Of these nothing stays: the next step begins where they did.
"""

from typing import Any

import numpy as np

from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.drafters.base import DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft
from specexport_runtime.drafters.head import DEFAULT_HEAD_LOOKAHEAD, HeadDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork


class HydraDrafter(HeadDrafter):
    """Draft tokens from Hydra heads, at most one a head; SpecexportError if the engine is not of Hydra heads."""

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        head = as_head(runner.executor)
        if head is None or not head.reads_draft:
            raise SpecexportError("the Hydra drafter needs the engine of Hydra heads.")
        self.traits = DrafterTraits(
            default_lookahead=min(DEFAULT_HEAD_LOOKAHEAD, head.num_draft_heads),
            has_own_cache=True,
            can_exit=True,
            max_lookahead=head.num_draft_heads,
            goes_on=True,
        )

    def _pending(self, draft: Draft) -> RowWork:
        """The features that the heads have not read, and the newest token; later, it and the draft so far."""
        if not draft.tokens:
            return super()._pending(draft)
        if draft.carried is None:
            raise SpecexportError("the heads handed nothing on.")
        tokens = self._known([draft.sequence.tokens[-1], *draft.tokens])
        return RowWork(tokens, 1, np.tile(draft.carried, (len(tokens), 1)))

    def _is_kept(self, draft: Draft) -> bool:
        """Features are, and tokens that are fed again are not."""
        return not draft.tokens

    def _input_ids(self, tokens: list[int]) -> list[int]:
        """Features alone but for the last, beside which is the newest token."""
        return [*[CONTEXT_ID] * (len(tokens) - 1), *tokens[-1:]]
