"""Drafting from one feature, that of the token before the newest: Medusa heads and Gemma-4 assistants.

Drafting with Medusa heads: each guesses one place of the draft, all from one hidden state (Cai et al. 2024).

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought after each
    draft:                               0 1 2  head i reads fd and guesses the i-th token after e

So the target's last feature is all that is ever read: there is no cache, and nothing to catch up on. A draft is one
step, a row for each wanted place. Its token is the number of the head, which reads no other rows. Each guess is drawn
from what its head says, whatever the guesses before it are: that is the distribution that is tested against.

Drafting with a Gemma-4 assistant: a head without a cache, which reads the target's own keys and values.

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought after each
    cache entry:  a    b    c    d              the target's
    fed:                         fd,e           at position 4, over all entries; it guesses f
                                 g,f            g is what it handed on; position and entries stay as they are

So there is nothing to catch up on, whatever was copied or left undrafted before, and nothing to forget after a test:
the next draft begins with a true feature and with the entries of the tokens that were accepted.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from specexport_runtime.drafters.at_once import ParallelWork
from specexport_runtime.drafters.base import HEAD, DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft, draft_at_once, open_drafts, run_drafts
from specexport_runtime.drafters.own_cache import OwnCacheDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import DraftPrefix, Proposal
from specexport_runtime.requests.request import Request

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.lookahead.draft_cost import DraftCost

DEFAULT_MEDUSA_LOOKAHEAD = 4
"""K where nothing else is asked for, if there are so many heads: each guesses less well than the one before."""

DEFAULT_ASSISTANT_LOOKAHEAD = 4
"""K where nothing else is asked for, as with other heads."""


class _Last(NamedTuple):
    """Features of a request's last tokens: the one that a draft is made of is among them."""

    start: int
    features: Float32Array


class LastFeatures:
    """Keeps, of each request, the features that its next draft may be made of.

    By request, not by row: nothing to do when rows move, and a dropped request takes its features along. Nor is there
    anything to do when drafts are rejected: which feature counts follows from how many tokens the request has.
    """

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Request, _Last] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, request: Request, start: int, features: Float32Array) -> None:
        """Keep a copy of what may be the last token's feature, of ``features`` [t, E] of tokens from ``start`` on."""
        first = max(start, len(request.tokens) - 2)  # those of a tree come when it is known what stays of it
        if first < start + len(features):
            self._last[request] = _Last(first, features[first - start :].copy())

    def of(self, request: Request) -> Float32Array:
        """The feature [E] of the token before the newest; SpecexportError if the target gave none."""
        last, at = self._last.get(request), len(request.tokens) - 2
        if last is None or not last.start <= at < last.start + len(last.features):
            raise SpecexportError("the target gave no features of this request.")
        feature: Float32Array = last.features[at - last.start]
        return feature


class LastFeatureDrafter(OwnCacheDrafter):
    """The part of a drafter whose head reads no other feature, and has no cache; ``named``: see its base class."""

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        self._last = LastFeatures()

    def wants_features(self, request: Request) -> bool:
        """Whether the head may be asked for this request; see ``Drafter.wants_features``."""
        return any(stage.drafter == HEAD for stage in request.draft_plan)

    def note_features(self, request: Request, start: int, features: Float32Array) -> None:
        """Keep what the next draft may be made of; see ``Drafter.note_features``."""
        self._last.note(request, start, features)

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """See ``Drafter.cost``."""
        from specexport_runtime.lookahead.draft_cost import EngineCost

        curve = curves.drafters.get(HEAD)
        return None if curve is None else EngineCost(curve, shares_cache=True)


class MedusaDrafter(LastFeatureDrafter):
    """Draft from Medusa heads over the target's last feature; their engine has no cache."""

    traits = DrafterTraits(default_lookahead=DEFAULT_MEDUSA_LOOKAHEAD, can_exit=True, goes_on=True)

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        self.num_heads = runner.executor.num_draft_heads
        if not self.num_heads:
            raise SpecexportError("the Medusa drafter needs the engine of Medusa heads.")
        most = min(DEFAULT_MEDUSA_LOOKAHEAD, self.num_heads)
        self.traits = self.traits._replace(default_lookahead=most, max_lookahead=self.num_heads)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Draft up to ``lookaheads[i]`` tokens, after those that are there already, at most one a head."""
        drafts = open_drafts(requests, lookaheads, begun, most=self.num_heads, one_by_one=True)
        if opened := [draft for draft in drafts if draft.is_open]:
            work = [self._make_head_work(draft) for draft in opened]
            draft_at_once(self.runner, opened, work, self.vocab_size)
        return [draft.proposal(HEAD) for draft in drafts]

    def _make_head_work(self, draft: Draft) -> ParallelWork:
        """A row for each head that is asked, with the feature of the token before the newest."""
        features = np.tile(self._last.of(draft.request), (draft.limit, 1))
        return ParallelWork(RowWork(range(draft.limit), draft.limit, features), 0)


class AssistantDrafter(LastFeatureDrafter):
    """Draft tokens from an assistant over the target's last feature and the target's cache (``BorrowedKv``)."""

    traits = DrafterTraits(default_lookahead=DEFAULT_ASSISTANT_LOOKAHEAD, can_exit=True, goes_on=True)

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        if not runner.executor.borrows_cache:
            raise SpecexportError("the assistant drafter needs the engine of an assistant.")
        super().__init__(runner, **named)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Draft for each request whose prompt the target has read to its end; see ``Drafter.propose``."""
        drafts = open_drafts(requests, lookaheads, begun, one_by_one=True)
        run_drafts(self.runner, drafts, self.vocab_size, self._pending)
        return [draft.proposal(HEAD) for draft in drafts]

    def _pending(self, draft: Draft) -> RowWork:
        """The newest token with the target's feature, or the last draft token with what the assistant handed on."""
        if draft.tokens:
            if draft.carried is None:
                raise SpecexportError("the assistant handed nothing on.")
            return RowWork(self._replace_unknown_ids(draft.tokens[-1:]), 1, draft.carried[None])
        req = draft.request
        if self.runner.kv.kv_len(req.row) != len(req.tokens) - 1:
            raise SpecexportError(
                f"the target has {self.runner.kv.kv_len(req.row)} entries of a request of {len(req.tokens)} tokens."
            )
        return RowWork(self._replace_unknown_ids(req.tokens[-1:]), 1, self._last.of(req)[None])
