"""Several drafters after one: each request names those it wants, and the first that finds something drafts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specexport_runtime.drafters.base import Drafter, DrafterTraits, DraftPrefix
from specexport_runtime.drafters.forced import BegunDrafts, begin_drafts, shorten
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import Allowed, Asked, Proposal
from specexport_runtime.requests.request import Request


class ChainDrafter(Drafter):
    """Walks each request's ``draft_plan`` until a stage proposes something.

    A plan of ``(lookup, draft-model)`` copies text where it can and asks the model where it cannot. An empty plan is
    plain decoding, so a chain of no drafters serves engines that never draft.

    What a grammar forces comes before all stages: it begins the draft, for any stage to continue, and is a draft by
    itself if none does.

    Requests that wait for the same drafter share one call, at whatever place it has in their plans; a drafter that
    none waits for is not called. Free ones are called before others, so that requests they have nothing for can still
    join another's call. All drafters hear of commits and rows: one that was not asked in some rounds catches up from
    what it has seen of a request.
    """

    traits = DrafterTraits(default_lookahead=1)  # of itself; plans ask the drafters after it

    def __init__(self, drafters: Mapping[str, Drafter] | None = None, lengths: Controller | None = None) -> None:
        self.drafters = dict(sorted((drafters or {}).items(), key=lambda item: not item[1].traits.is_free))
        self.lengths = lengths

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside the engines of all drafters since creation."""
        return sum(drafter.engine_seconds for drafter in self.drafters.values())

    @property
    def prefill_seconds(self) -> float:
        """Of these, in steps that only read prompts."""
        return sum(drafter.prefill_seconds for drafter in self.drafters.values())

    def propose(
        self,
        requests: Sequence[Request],
        lookaheads: Sequence[int],
        begun: Sequence[DraftPrefix] | None = None,  # noqa: ARG002 - drafts begin here, with what grammars force
    ) -> list[Proposal]:
        """Draft tokens for each request, in ascending rows, at most as many as it has room for (``lookaheads``)."""
        forced = begin_drafts(requests, lookaheads)
        proposals = [Proposal([], end="none") for _ in requests] if forced is None else forced.alone()
        plans = [
            [(name, min(own, room)) for name, own in req.draft_plan if min(own, room) > 0]
            for req, room in zip(requests, lookaheads if forced is None else forced.rooms, strict=True)
        ]
        traces: dict[int, list[Asked]] = {i: [] for i, req in enumerate(requests) if req.trace is not None}
        lengths = self.lengths if any(req.adaptive for req in requests) else None
        if lengths is not None and forced is not None:
            lengths.begun(sum([len(each.tokens) for each in forced.drafts]))
        while any(plans):
            name = self._find_next({plan[0][0] for plan in plans if plan})
            limits = [plan[0][1] if plan and plan[0][0] == name else 0 for plan in plans]
            found, allowed = self._propose_with(name, requests, limits, lengths, forced)
            for i, limit in enumerate(limits):
                if not limit:
                    continue
                req, proposal = requests[i], found[i]
                settled = bool(proposal.tokens) or proposal.error is not None
                plans[i] = [] if settled else plans[i][1:]
                if settled:
                    proposals[i] = proposal if proposal.drafter == name else proposal._replace(drafter=name)
                if i in traces:
                    traces[i].append(Asked(name, *self._allowed(req, name, limit, allowed[i])))
        if forced is not None:
            proposals = forced.extend(proposals)
        if lengths is not None:
            proposals = lengths.choose_branches(requests, proposals)
        for i, asked in traces.items():
            promised = () if lengths is None or not requests[i].adaptive else lengths.promises(requests[i], asked)
            proposals[i] = proposals[i]._replace(asked=tuple(asked), promised=promised)
        return proposals

    def _propose_with(
        self,
        name: str,
        requests: Sequence[Request],
        limits: Sequence[int],
        lengths: Controller | None,
        begun: BegunDrafts | None,
    ) -> tuple[list[Proposal], Sequence[Allowed | None]]:
        """Drafts of one drafter, as long as they may be."""
        drafter = self.drafters[name]
        if lengths is None:
            return _propose_within_grammars(drafter, requests, limits, begun), [None] * len(limits)
        if drafter.traits.is_free:
            lengths.allow_copy_branches(name, requests, limits)
            found = _propose_within_grammars(drafter, requests, limits, begun)
            allowed = lengths.cut(name, requests, found, limits)
            cut = [
                proposal
                if proposal.num_own <= most.lookahead
                else shorten(proposal, len(proposal.forced) + most.lookahead, "lookahead")
                for proposal, most in zip(found, allowed, strict=True)
            ]
            return cut, allowed
        allowed = lengths.allow(name, requests, limits)
        most = [each.lookahead for each in allowed]
        # Nobody drafts: a true bypass, the drafter does not even hear of it.
        if not any(most):
            return [_NOTHING] * len(most), allowed
        start = time.perf_counter()
        found = _propose_within_grammars(drafter, requests, most, begun)
        lengths.drafted(name, requests, found, time.perf_counter() - start)
        return found, allowed

    @staticmethod
    def _allowed(req: Request, name: str, limit: int, allowed: Allowed | None) -> Allowed:
        """For the trace: what a request was allowed, and why."""
        if allowed is not None and req.adaptive:
            return allowed
        own = next(lookahead for drafter, lookahead in req.draft_plan if drafter == name)
        return Allowed(limit, "fixed" if limit == own else "room")

    def _find_next(self, wanted: set[str]) -> str:
        for name in self.drafters:
            if name in wanted:
                return name
        raise SpecexportError(f"no drafter is named {' or '.join(sorted(wanted))}; there is {list(self.drafters)}.")

    def commit(self, requests: Sequence[Request]) -> None:
        """Tell every drafter; see ``Drafter.commit``."""
        for drafter in self.drafters.values():
            drafter.commit(requests)

    def move_row(self, source: int, destination: int) -> None:
        """Tell every drafter; see ``Drafter.move_row``."""
        for drafter in self.drafters.values():
            drafter.move_row(source, destination)

    def release_row(self, row: int) -> None:
        """Tell every drafter; see ``Drafter.release_row``."""
        for drafter in self.drafters.values():
            drafter.release_row(row)

    def can_restart(self, request: Request) -> bool:
        """Whether every drafter of the request's plan can go on when it was paused."""
        return all(drafter.can_restart(request) for drafter in self._list_planned(request))

    def restart(self, request: Request) -> None:
        """Tell every drafter, and what chooses their lengths; see ``Drafter.restart``."""
        for drafter in self.drafters.values():
            drafter.restart(request)
        if self.lengths is not None:
            self.lengths.record_pause(request)

    def snapshot(self, request: Request) -> Mapping[str, Any]:
        """What each drafter has of a request's row, by name; see ``Drafter.snapshot``."""
        return {name: drafter.snapshot(request) for name, drafter in self.drafters.items()}

    def restored(self, entries: Mapping[ModelRunner, int]) -> Mapping[str, Any]:
        """What each drafter has of such a row, by name; see ``Drafter.restored``."""
        return {name: drafter.restored(entries) for name, drafter in self.drafters.items()}

    def usable(self, request: Request, kept: Mapping[str, Any], count: int) -> int:
        """How many of ``count`` common tokens the request's drafters can go on from; see ``Drafter.usable``."""
        planned = {name for name, _ in request.draft_plan}
        for name, drafter in self.drafters.items():
            if name in planned:
                count = drafter.usable(request, kept[name], count)
        return count

    def adopt(self, request: Request, kept: Mapping[str, Any], count: int) -> None:
        """Tell every drafter; see ``Drafter.adopt``."""
        for name, drafter in self.drafters.items():
            drafter.adopt(request, kept[name], count)

    def copy_row(self, source: int, destination: int, kept: Mapping[str, Any]) -> None:
        """Tell every drafter; see ``Drafter.copy_row``."""
        for name, drafter in self.drafters.items():
            drafter.copy_row(source, destination, kept[name])

    def swap_rows(self, one: int, other: int, kept: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]) -> None:
        """Tell every drafter; see ``Drafter.swap_rows``."""
        of_one, of_other = kept
        for name, drafter in self.drafters.items():
            drafter.swap_rows(one, other, (of_one and of_one[name], of_other and of_other[name]))

    def forget_row(self, row: int) -> None:
        """Tell every drafter; see ``Drafter.forget_row``."""
        for drafter in self.drafters.values():
            drafter.forget_row(row)

    def wants_similarity(self, request: Request) -> bool:
        """Whether a drafter of the request's plan does."""
        return any(drafter.wants_similarity(request) for drafter in self._list_planned(request))

    def note_similarity(self, request: Request, similarity: Float32Array) -> None:
        """Tell the drafters of the request's plan that want to know."""
        for drafter in self._list_planned(request):
            if drafter.wants_similarity(request):
                drafter.note_similarity(request, similarity)

    def wants_features(self, request: Request) -> bool:
        """Whether a drafter of the request's plan does."""
        return any(drafter.wants_features(request) for drafter in self._list_planned(request))

    def note_features(self, request: Request, start: int, features: Float32Array) -> None:
        """Tell the drafters of the request's plan that want to know."""
        for drafter in self._list_planned(request):
            if drafter.wants_features(request):
                drafter.note_features(request, start, features)

    def _list_planned(self, request: Request) -> Iterator[Drafter]:
        """The drafters of a request's plan."""
        return (self.drafters[name] for name, _ in request.draft_plan)


_NOTHING = Proposal([], end="none")


def _propose_within_grammars(
    drafter: Drafter, requests: Sequence[Request], limits: Sequence[int], begun: BegunDrafts | None
) -> list[Proposal]:
    """What a drafter proposes, within the grammars of the requests."""
    if begun is None:
        return drafter.propose(requests, limits)
    if drafter.traits.goes_on:
        return begun.fit(drafter.propose(requests, limits, begun.drafts))
    limits = [0 if each.tokens else limit for each, limit in zip(begun.drafts, limits, strict=True)]
    return begun.fit(drafter.propose(requests, limits))
