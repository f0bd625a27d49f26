"""Drafting with a head: a small model that reads the target's own hidden states (EAGLE; Li et al. 2024, 2025).

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought after each
    head entry:   fa,b fb,c fc,d fd,e           entry i: the feature of token i, and token i+1; it guesses token i+2

A draft goes on with what the head itself handed on, in the place of features that are not there yet. When the target
has tested the draft, the entries after the last true feature are forgotten, and the accepted tokens are fed again with
the features that the target gave: left in the cache, the head's own would cost acceptance.

A parallel head (P-EAGLE, DFlash) guesses all tokens in one step: after the entries that it catches up on come
stand-ins for the tokens that are not known yet (``at_once``). Each guess is drawn from what the head says of its place
alone, whatever the guesses before it are: that is the distribution that is tested against. Heads that correct their
logits by the guesses before a place (DFlash 2, DSpark) draw from what comes of it (``correction``).

Drafting with Hydra heads: each reads the tokens that those before it guessed (Ankner et al. 2024).

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought after each
    step 1:       fa.  fb.  fc.  fd,e           the first head reads fd and e, and guesses x
    step 2:                      fd,e  fd,x     the second reads fd, e and x

One step is one token of each draft, as with an EAGLE head, and the first one reads features: they are entries of the KV
cache, if a decoder layer is in front of the heads. A later step is fed all tokens that its head reads, each beside the
hidden state that the first one handed on. Of these nothing stays: the next step begins where they did.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.drafters.at_once import (
    ParallelCost,
    ParallelWork,
    count_entries_behind,
    make_entry_tokens,
    make_parallel_work,
)
from specexport_runtime.drafters.base import HEAD, DrafterTraits
from specexport_runtime.drafters.correction import make_corrector
from specexport_runtime.drafters.draft_loop import Draft, draft_at_once, open_drafts, run_drafts
from specexport_runtime.drafters.own_cache import OwnCacheDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.lookahead.draft_cost import DraftCost, EngineCost
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import DraftPrefix, Proposal
from specexport_runtime.requests.request import NO_ROW, Request

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import MaskInput
    from specexport_runtime.costs.curves import CostCurves

DEFAULT_HEAD_LOOKAHEAD = 4
"""K where nothing else is asked for: a head's step is cheap, and its acceptance falls with each of its own features."""
MAX_HELD = 512  # features of a request that wait for the head to read them


class PendingFeatures:
    """Features of a request that the head has not read: those of consecutive positions."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.parts: list[Float32Array] = []
        self.count = 0

    def add(self, start: int, features: Float32Array) -> None:
        if not self.count:
            self.start = start
        if start != self.start + self.count:
            raise SpecexportError(f"features of position {start} came, and {self.start + self.count} is next.")
        self.parts.append(features.copy())
        self.count += len(features)

    def copy(self) -> "PendingFeatures":
        """The same features; what becomes of them does not change the copy."""
        made = PendingFeatures(self.start)
        made.parts, made.count = list(self.parts), self.count
        return made

    def keep(self, count: int) -> None:
        """Forget all but the first ``count``."""
        if count < self.count:
            self.parts = [np.concatenate(self.parts)[:count].copy()] if count > 0 else []
            self.count = max(count, 0)

    def take(self) -> Float32Array:
        """All of them; none are left."""
        features = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)
        self.parts, self.count = [], 0
        return features


class _Snapshot(NamedTuple):
    """What a head has of a row: entries in its cache, and the features after them."""

    entries: int
    held: PendingFeatures


class HeadDrafter(OwnCacheDrafter):
    """Draft tokens from a head over the target's features, with a KV cache of its own, row for row beside the target's.

    ``mask`` is what a parallel head is fed for tokens that are not known; None for one that drafts token after token.
    ``named``: see :class:`OwnCacheDrafter`. SpecexportError: the runner's engine is no head's.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_HEAD_LOOKAHEAD, has_own_cache=True, can_exit=True, goes_on=True)
    reach = 1  # tokens after its feature that an entry knows

    def __init__(self, runner: ModelRunner, *, mask: "MaskInput | None" = None, **named: Any) -> None:
        if not runner.executor.reads_features:
            raise SpecexportError("the head drafter needs the engine of a draft head.")
        super().__init__(runner, **named)
        self._mask, self._corrector = mask, make_corrector(mask)
        if mask is not None:
            self.traits = self.traits._replace(max_lookahead=mask.most)
        # By request, not by row: nothing to do when rows move, and a dropped request takes its features along.
        self._held: WeakKeyDictionary[Request, PendingFeatures] = WeakKeyDictionary()

    def wants_features(self, request: Request) -> bool:
        """Whether the head may be asked for this request; see ``Drafter.wants_features``."""
        return any(stage.drafter == HEAD for stage in request.draft_plan)

    def note_features(self, request: Request, start: int, features: Float32Array) -> None:
        """Keep features of committed tokens for the head's next step; many are read now."""
        held = self._held.setdefault(request, PendingFeatures())
        if held.count + len(features) > MAX_HELD and held.count:
            self._read_held(request, held)
        held.add(start, features)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Draft up to ``lookaheads[i]`` tokens for each request; see ``Drafter.propose``.

        A request whose prompt the target has not read to its end drafts nothing. Tokens that are there already, or
        that a grammar forces, take a step or a place of the head's as its own guesses do: there are no features of
        them.
        """
        mask = self._mask
        drafts = open_drafts(requests, lookaheads, begun, most=self.traits.max_lookahead, one_by_one=True)
        if mask is None:
            run_drafts(self.runner, drafts, self.vocab_size, self._pending, self._is_kept)
        elif opened := [draft for draft in drafts if draft.is_open]:
            work = [self._make_parallel_work(draft, mask) for draft in opened]
            draft_at_once(self.runner, opened, work, self.vocab_size, self._corrector)
        return [draft.proposal(HEAD) for draft in drafts]

    def _pending(self, draft: Draft) -> RowWork:
        """The last draft token with what the head handed on, or the entries whose true features it has not read."""
        if draft.tokens:
            if draft.carried is None:
                raise SpecexportError("the head handed nothing on.")
            return RowWork(self._replace_unknown_ids(draft.tokens[-1:]), 1, draft.carried[None])
        tokens, features = self._unread(draft.request)
        return RowWork(tokens, 1, features)

    def _is_kept(self, draft: Draft) -> bool:  # noqa: ARG002
        """Whether the entries of the next step are committed, till the draft was tested."""
        return True

    def _read_held(self, request: Request, held: PendingFeatures) -> None:
        """Read all features that wait."""
        self.runner.prefill(request.row, *self._entries(request, held))

    def _unread(self, req: Request, behind: int = 0) -> tuple[list[int], Float32Array]:
        """Input ids and features of the entries that the head has not read; if they are many, of the last of them.

        ``behind`` entries follow them in the step.
        """
        held = self._held.get(req)
        if held is None or not held.count:
            raise SpecexportError("the target gave no features of this request.")
        tokens, features = self._entries(req, held)
        if len(tokens) > self._limit_new_tokens(self.max_backlog, behind):
            self.runner.prefill(req.row, tokens[:-1], features[:-1])
            tokens, features = tokens[-1:], features[-1:]
        return tokens, features

    def _make_parallel_work(self, draft: Draft, mask: "MaskInput") -> ParallelWork:
        """The entries that a parallel head has not read, and what stands for tokens that nobody knows."""
        tokens, features = self._unread(draft.request, count_entries_behind(draft.limit, mask))
        newest = self._replace_unknown_ids(draft.request.tokens[-1:])[0]
        return make_parallel_work(tokens, features, newest, draft.limit, mask)

    def _entries(self, req: Request, held: PendingFeatures) -> tuple[list[int], Float32Array]:
        """Tokens and features of the entries that are held; none are left."""
        start, count = held.start, held.count
        if start != self.runner.kv.kv_len(req.row):
            raise SpecexportError(
                f"features begin at {start}, and the head goes on at {self.runner.kv.kv_len(req.row)}."
            )
        tokens = self._replace_unknown_ids(req.tokens[start + 1 : start + 1 + count])
        return self._input_ids(tokens), held.take()

    def _input_ids(self, tokens: list[int]) -> list[int]:
        """Input ids of entries of known features, by the token after each."""
        return make_entry_tokens(tokens, self._mask)

    def restart(self, request: Request) -> None:
        """Forget the features of a paused request: those of all its tokens come again; see ``Drafter.restart``."""
        self._held.pop(request, None)

    def snapshot(self, request: Request) -> Any:
        """Entries, and features that the head has not read; see ``Drafter.snapshot``."""
        entries, held = self.runner.kv.kv_len(request.row), self._held.get(request)
        if held is None or held.start != entries:
            return _Snapshot(entries, PendingFeatures(entries))
        return _Snapshot(entries, held.copy())

    def restored(self, entries: Mapping[ModelRunner, int]) -> Any:
        """See ``Drafter.restored``."""
        count = super().restored(entries)
        return _Snapshot(count, PendingFeatures(count))

    def usable(self, request: Request, kept: Any, count: int) -> int:
        """See ``Drafter.usable``: the head goes on only after the last token that it has the feature of.

        Entry i knows tokens after it, one or ``reach``, so that the last ones of a common text are others, and the
        features that they would be made of again are gone.
        """
        if not self.wants_features(request):
            return count
        entries, held = kept
        return min(count, held.start + held.count) if entries <= count - self.reach else max(0, count - self.reach)

    def adopt(self, request: Request, kept: Any, count: int) -> None:
        """See ``Drafter.adopt``."""
        if not self.wants_features(request):
            return
        entries, held = kept
        self.runner.kv.restore(request.row, min(entries, count))
        self._held[request] = own = held.copy() if entries < count else PendingFeatures(count)
        own.keep(count - own.start)

    def _entries_of(self, kept: Any) -> int:
        entries: int = kept.entries
        return entries

    def commit(self, requests: Sequence[Request]) -> None:
        """Forget features of rejected tokens, and all entries that the head made of features of its own."""
        for req in requests:
            held = self._held.get(req)
            if held is not None and held.count:
                held.keep(len(req.tokens) - 1 - held.start)
                if req.row != NO_ROW and self.runner.kv.kv_len(req.row) > held.start:
                    self.runner.kv.commit(req.row, held.start)

    def cost(self, curves: "CostCurves") -> DraftCost | None:
        """See ``Drafter.cost``."""
        curve = curves.drafters.get(HEAD)
        if curve is None:
            return None
        return EngineCost(curve) if self._mask is None else ParallelCost(curve)


class HydraDrafter(HeadDrafter):
    """Draft tokens from Hydra heads, at most one a head; SpecexportError if the engine is not of Hydra heads."""

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        if not runner.executor.reads_draft:
            raise SpecexportError("the Hydra drafter needs the engine of Hydra heads.")
        count = runner.executor.num_draft_heads
        self.traits = self.traits._replace(default_lookahead=min(DEFAULT_HEAD_LOOKAHEAD, count), max_lookahead=count)

    def _pending(self, draft: Draft) -> RowWork:
        """The features that the heads have not read, and the newest token; later, it and the draft so far."""
        if not draft.tokens:
            return super()._pending(draft)
        if draft.carried is None:
            raise SpecexportError("the heads handed nothing on.")
        tokens = self._replace_unknown_ids([draft.request.tokens[-1], *draft.tokens])
        return RowWork(tokens, 1, np.tile(draft.carried, (len(tokens), 1)))

    def _is_kept(self, draft: Draft) -> bool:
        """Features are, and tokens that are fed again are not."""
        return not draft.tokens

    def _input_ids(self, tokens: list[int]) -> list[int]:
        """Features alone but for the last, beside which is the newest token."""
        return [*[CONTEXT_ID] * (len(tokens) - 1), *tokens[-1:]]
