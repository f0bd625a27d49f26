"""Drafting with the target itself, some of its layers switched off: no second copy of weights, no second KV cache.

::

    cache row:   [ committed by the target | written by the draft | free ]
                   0                  kv_len

A draft step runs the layers that are on over the target's own committed entries, and writes after them. Verification
feeds the same tokens through all layers and overwrites what the draft wrote. A layer that is off writes nothing and is
not read either, in the draft that it is off for.

Layers that keep a state do likewise, with what is pending beside it in the place of cache entries (``packing.kv``)::

    state  |  pending: [ accepted by the last verify step | written by the draft | free ]

No draft step lets anything into a state: what was accepted enters in the next verify step, in all layers alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from specexport_runtime.drafters.base import Drafter, DrafterKind, DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft, open_drafts, run_drafts
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import BoolArray, Float32Array
from specexport_runtime.lookahead.draft_cost import DraftCost
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.layer_choice import LayerChoice, LayerRules, choose_layers
from specexport_runtime.requests.records import DraftPrefix, Proposal
from specexport_runtime.requests.request import Request

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves

SELF = "self"
"""Name of this drafter in draft plans."""
DEFAULT_SELF_LOOKAHEAD = 3
"""K of self-drafting: its step costs about half of the target's, so (1 + a + … + a^K) / (1 + K/2) is at its best for K
from 2 (at an acceptance a of 0.8) to 4 (at 0.9)."""
_LIKELY_SHARE = 1 / 3  # of the layers is left out, in a draft whose layers were not chosen yet


class LayersCost(DraftCost):
    """The cost of drafting with those of the target's own layers that ``find_choice`` gives, in its own cache."""

    def __init__(self, curves: "CostCurves", find_choice: Callable[[Request], LayerChoice | None]) -> None:
        self._curves, self._choice_of = curves, find_choice

    def seconds(self, requests: Sequence[Request], num_rows: int, kv_entries: float) -> float:
        """See ``DraftCost.seconds``. Requests with different layers draft one after another."""
        found = (self._choice_of(req) for req in requests)
        choices = {(choice.mixers, choice.mlp): choice for choice in found if choice is not None}.values()
        if choices:
            mixers = sum(each.mixers.count(False) for each in choices) / len(choices)
            mlps = sum(each.mlps_off for each in choices) / len(choices)
        else:
            shares = self._curves.shares
            mixers = mlps = 0 if shares is None else _LIKELY_SHARE * shares.num_layers
        groups = min(max(len(choices), 1), num_rows)
        each = -(-num_rows // groups)
        return groups * self._curves.self_draft_seconds(mixers, mlps, each, each, kv_entries / groups)


class SelfDrafter(Drafter):
    """Draft tokens from the target with the layers off that its rules choose for a prompt (ASD, Metel et al. 2024).

    The choice is made once a prompt, before the first draft after it, see :meth:`find_choice`. One that removes nothing
    drafts nothing. Requests with different choices are drafted one group after another, so that what is drafted for one
    never depends on its neighbours.

    ``runner`` is the target's own, over an executor with gates. Its cache and its committed lengths are used while a
    draft goes on, and are as before when ``propose`` returns or raises. ``vocab_size``: ids that may be drafted.
    SpecexportError: the target's layers cannot be switched off, or its cache holds padding.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_SELF_LOOKAHEAD, can_exit=True, takes_layers=True, goes_on=True)
    engine_seconds = 0.0

    def __init__(self, runner: ModelRunner, *, vocab_size: int) -> None:
        executor = runner.executor
        if not (executor.num_gates and runner.unpad_kv):
            raise SpecexportError("self-drafting needs an engine with gates, and a KV cache without padding.")
        self.runner = runner
        self.vocab_size = min(vocab_size, executor.vocab_size)
        self.num_layers, self._kinds = executor.num_gates // 2, tuple(executor.gate_kinds)
        self._executor = executor
        # By request, not by row: nothing to do when rows move, and a dropped request takes its sums along.
        self._sums: WeakKeyDictionary[Request, tuple[npt.NDArray[np.float64], int]] = WeakKeyDictionary()
        self._choices: WeakKeyDictionary[Request, LayerChoice] = WeakKeyDictionary()

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Draft for each request whose prompt was read, and of which a layer goes; see ``Drafter.propose``."""
        drafts = open_drafts(requests, lookaheads, begun)
        groups: dict[bytes, tuple[BoolArray, list[Draft]]] = {}
        for draft in drafts:
            if draft.is_open and (choice := self._choice(draft.request)).can_draft:
                mask = choice.mask
                groups.setdefault(mask.tobytes(), (mask, []))[1].append(draft)
        for mask, group in groups.values():
            with self._borrow_target(mask, group):
                run_drafts(self.runner, group, self.vocab_size, self._unseen)
        return [draft.proposal(SELF) for draft in drafts]

    def can_restart(self, request: Request) -> bool:  # noqa: ARG002
        """Always: the rows are the target's."""
        return True

    def restart(self, request: Request) -> None:
        """What was measured of half a prompt is measured again; a choice stays. See ``Drafter.restart``."""
        if not request.num_generated:
            self._sums.pop(request, None)

    def usable(self, request: Request, kept: Any, count: int) -> int:  # noqa: ARG002
        """Nothing, if layers are chosen by how much they change the whole prompt: the target must read it then."""
        return 0 if self.wants_similarity(request) else count

    def wants_similarity(self, request: Request) -> bool:
        """While the prompt is read, if the request may draft with its target and its rules look at similarities."""
        planned = any(stage.drafter == SELF for stage in request.draft_plan)
        return planned and not request.num_generated and not request.layer_rules.is_blind

    def note_similarity(self, request: Request, similarity: Float32Array) -> None:
        """Add a chunk of the prompt to what the choice is made from, in float64: chunks change no average."""
        sums, count = self._sums.get(request, (np.zeros(len(similarity)), 0))
        added = similarity.sum(axis=1, dtype=np.float64)
        self._sums[request] = (sums + added, count + similarity.shape[1])

    def find_choice(self, request: Request) -> LayerChoice | None:
        """The layers that a request's drafts have; None while they are not chosen."""
        rules = request.layer_rules
        known = self._choices.get(request)
        return _choose_blindly(rules, self.num_layers, self._kinds) if known is None and rules.is_blind else known

    def choose(self, request: Request, choice: LayerChoice) -> None:
        """Draft for ``request`` with the layers of ``choice``; its statistics say so."""
        self._choices[request] = request.stats.layer_choice = choice

    def cost(self, curves: "CostCurves") -> DraftCost | None:
        """See ``Drafter.cost``."""
        return LayersCost(curves, self.find_choice)

    def _choice(self, req: Request) -> LayerChoice:
        choice = self._choices.get(req)
        if choice is None:
            choice = self.find_choice(req)
            if choice is None:
                if req not in self._sums:
                    raise SpecexportError("no similarity was measured while the target read this prompt.")
                sums, count = self._sums.pop(req)
                choice = choose_layers((sums / count).tolist(), req.layer_rules, self.num_layers, self._kinds)
            self.choose(req, choice)
        return choice

    def _unseen(self, draft: Draft) -> RowWork:
        """What the next draft step is fed: what was added to the draft, after the newest token that was committed."""
        req = draft.request
        return RowWork(draft.list_tokens_since(self.runner.kv.kv_len(req.row)), 1, adapter=req.adapter, settles=False)

    @contextmanager
    def _borrow_target(self, mask: BoolArray, group: Sequence[Draft]) -> Iterator[None]:
        """The target's engine and cache as a draft uses them, given back as they were; costs are this drafter's."""
        executor, kv = self._executor, self.runner.kv
        before = executor.engine_seconds
        kv_lens = [(draft.request.row, kv.kv_len(draft.request.row)) for draft in group]
        executor.set_layers(mask)
        try:
            yield
        finally:
            executor.set_layers(None)
            for row, kv_len in kv_lens:
                kv.commit(row, kv_len)
            self.engine_seconds += executor.engine_seconds - before
            executor.engine_seconds = before


@lru_cache(maxsize=64)
def _choose_blindly(rules: LayerRules, num_layers: int, kinds: tuple[str, ...]) -> LayerChoice:
    return choose_layers((), rules, num_layers, kinds)


KIND = DrafterKind(
    SelfDrafter.traits,
    lambda parts: SelfDrafter(parts.target, vocab_size=parts.vocab_size),
    lambda offer: offer.layers_obstacle,
    method="self",
)
