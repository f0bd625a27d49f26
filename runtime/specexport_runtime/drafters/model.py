"""Drafting with a draft model (Chen et al. 2023): K tokens, one after another, from a smaller model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexport_runtime.drafters.base import DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft, open_drafts, run_drafts
from specexport_runtime.drafters.own_cache import OwnCacheDrafter
from specexport_runtime.packing.batch import RowWork
from specexport_runtime.requests.records import DraftPrefix, Proposal
from specexport_runtime.requests.request import Request

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.lookahead.draft_cost import DraftCost

DRAFT_MODEL = "draft-model"
"""Name of this drafter in draft plans."""
DEFAULT_LOOKAHEAD = 4
"""K where nothing else is asked for: the best in most settings of Chen et al. 2023 (figure 1)."""


class ModelDrafter(OwnCacheDrafter):
    """Draft tokens from a second model with a KV cache of its own, row for row beside the target's.

    Before drafting, the model is fed every committed token beyond its own ``kv_len``: one after a rejection, two after
    a round that accepted everything, more after rounds in which it was not asked, the whole prompt for a new request.
    Catching up needs no other case. Arguments: see :class:`OwnCacheDrafter`.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_LOOKAHEAD, has_own_cache=True, can_exit=True, goes_on=True)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Draft for requests in any ascending rows; all others sit the step out. See ``Drafter.propose``."""
        # A new prompt's first token should not wait for the draft model to read the prompt.
        drafts = open_drafts(requests, lookaheads, begun)
        run_drafts(self.runner, drafts, self.vocab_size, self._pending)
        return [draft.proposal(DRAFT_MODEL) for draft in drafts]

    def _pending(self, draft: Draft) -> RowWork:
        """Tokens the draft model has not seen: of the draft, and what it must catch up on."""
        pending = self._unread(draft)
        if len(pending) > self.max_backlog:
            self.runner.prefill(draft.request.row, pending[:-1])
            pending = pending[-1:]
        return RowWork(pending, 1)

    def _unread(self, draft: Draft) -> list[int]:
        return self._replace_unknown_ids(draft.list_tokens_since(self.runner.kv.kv_len(draft.request.row)))

    def commit(self, requests: Sequence[Request]) -> None:
        """Keep the cache entries of accepted tokens; the token the target added has not been fed yet."""
        for req in requests:
            kv_len = self.runner.kv.kv_len(req.row)
            self.runner.kv.commit(req.row, min(kv_len, req.num_agreed))

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """See ``Drafter.cost``."""
        from specexport_runtime.lookahead.draft_cost import EngineCost

        curve = curves.drafters.get(DRAFT_MODEL)
        return None if curve is None else EngineCost(curve)
