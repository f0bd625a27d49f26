"""The controller: how far to draft for the most expected tokens per second of the whole step.

For every round it weighs, for request i with K_i draft tokens::

    goodput = sum_i E_i(K_i) / (target step of B + sum_i K_i tokens + draft steps)
    E_i(K)  = 1 + a_i1 + a_i1 a_i2 + … + a_i1 … a_iK

with a_ij the chance that the j-th draft token passes if those before it did (``acceptance``), and the seconds of a
bundle's sizes, mended by what rounds took (``costs``). K_i = 0 for all is plain decoding, for which no drafter is
called. What is allowed is decided by the ``rules``, one after the other.

Choices may depend on all that was before a round, because no random number serves two rounds (``RoundDraws``), or two
adaptive requests: these have others than their seed's (``intake``). So sampled text may depend on who shares the batch
or came before; its distribution does not, and greedy text never changes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts, RoundSeconds, make_reading_key
from specexport_runtime.errors import SpecexportError
from specexport_runtime.lookahead import trees
from specexport_runtime.lookahead.acceptance import GUESS, MAX_MATCH, MODEL_GUESS, NUM_MATCH_SLOTS, match_slots
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.lookahead.memory import DrafterMemory, StageMemory
from specexport_runtime.lookahead.round import DraftCandidate, Round, Stage
from specexport_runtime.lookahead.rules import COPIED, DRAFTED
from specexport_runtime.requests.records import Allowed, Asked, LengthReason, Promise, Proposal, StepLoad

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request

_WATCHED, _WATCH_EVERY = 64, 4
"""So many rounds are compared with what was promised, later every fourth: it takes a tenth of a millisecond."""
_HARDLY = 0.1
"""What a draft reads first belongs to its steps up to this share of them; a larger share is counted apart.

Replayed: where nothing is counted apart, 3 % slower at worst.
"""
_QUIET, _REFUSED = 64, 16
"""Most rounds without asking drafters again, where none drafted or the account refused a probe.

Replayed: asking every round changes no choice, and takes ten times the controller's own time.
"""
_BUCKET = 64  # cache entries a row that count as the same circumstances
_BYPASS = Allowed(0, "bypass", 1.0)
_NO_STAGES: dict[str, StageMemory] = {}


class Controller:
    """Chooses how far adaptive requests draft, between 0 (that drafter is not called) and ``lookahead``.

    ``curves`` are fixed when the engine is loaded; ``learned`` mends them by what rounds took, None takes them as they
    are. ``drafters`` are those that plans of adaptive requests may name.
    """

    def __init__(
        self,
        curves: CostCurves,
        lookahead: int,
        *,
        drafters: Mapping[str, WeighedDrafter],
        learned: LearnedCosts | None = None,
    ) -> None:
        self.curves, self._learns = curves, learned is not None
        self._learned = learned or LearnedCosts({"ratios": {name: {"1": 1.0} for name in drafters}})
        self._known = dict(drafters)
        self._stages: WeakKeyDictionary[Request, dict[str, StageMemory]] = WeakKeyDictionary()
        self._positions, self._matches = list(range(lookahead)), match_slots(lookahead)
        self._drafters: dict[str, DrafterMemory] = {}
        """By name, and apart for requests with a grammar: what JSON is like tells nothing of free text. Apart by the
        rule of acceptance too: a block keeps more of the same drafts."""
        self._quiet: dict[str, tuple[tuple[int, ...], int, WeakSet[Request]]] = {}
        """Circumstances in which, until a round, these do without a drafter: a useless one must cost almost nothing."""
        self._round = Round(0, StepLoad(1, 1, 1, 0), curves, self._learned)

    def begin_round(self, load: StepLoad) -> None:
        """A round with adaptive requests begins."""
        number = self._round.number + 1
        self._round = Round(number, load, self.curves, self._learned, expected=float(load.num_ready))
        for drafter in self._drafters.values():
            drafter.account.record_gain()

    def begun(self, num_forced: int) -> None:
        """Drafts begin with so many tokens in this round that are sure to be accepted; called before all stages."""
        self._round.drafted += num_forced
        self._round.expected += num_forced

    def allow(self, drafter: str, requests: "Sequence[Request]", limits: Sequence[int]) -> list[Allowed]:
        """How far each request, in ascending rows, may draft with a drafter that costs time; called before it drafts.

        ``limits`` are the most tokens of each: the stage's lookahead or the request's room; 0 for those that do not
        wait for this drafter. Requests that are not adaptive draft up to it.
        """
        now, known = self._round, self._known[drafter]
        waiting = [i for i, req in enumerate(requests) if limits[i] and req.adaptive]
        allowed = [_BYPASS if req.adaptive else Allowed(limit) for req, limit in zip(requests, limits, strict=True)]
        fixed = [each.lookahead for each in allowed if each.lookahead]
        now.drafted += sum(fixed)
        if not waiting or (not fixed and self._is_quiet(drafter, [requests[i] for i in waiting])):
            return allowed
        if known.cost is None:
            raise SpecexportError(f"what a step of drafter {drafter!r} costs is not known.")
        rows = [sum([length > depth for length in fixed]) for depth in self._positions]
        asks = [self._make_candidate(i, drafter, requests[i], limits[i]) for i in waiting]
        stage = Stage(now, drafter, known, requests, asks, rows)
        for rule in DRAFTED:
            rule(stage)
        for ask in asks:
            can_end = known.traits.can_exit and ask.req.draft_exit is None and ask.req.sampler.is_greedy
            ask.req.sure = ask.memory.sure.begin(ask.least) if can_end and self.curves.has_logits else None
            if ask.count:
                reason = "probe" if ask.is_probe else self._find_length_reason(drafter, ask, limits[ask.index])
                goes_on = ask.req.sure is not None and ask.goes_on and not now.is_shorter
                allowed[ask.index] = Allowed(ask.most if goes_on else ask.count, reason, 1.0 + ask.expected)
                if reading := stage.catch_up(ask, mended=False):
                    now.catching_up[drafter] = now.catching_up.get(drafter, 0.0) + reading
            ask.req.siblings = ()
        self._record_quiet(stage)
        if total := sum([ask.count for ask in asks]):
            seconds = stage.draft_seconds([ask.count for ask in asks]) + now.verify(total)[-1] - now.verify(0)[0]
            for ask in asks:
                both = stage.catch_up(ask) + stage.each_round, seconds / total
                ask.memory.price = (0.0, 0.0) if ask.is_probe else both  # which is paid
        now.grant(asks)
        self._allow_branches(stage)
        return allowed

    def _allow_branches(self, stage: Stage) -> None:
        """Say how many branches the drafts of a stage may have beside each token.

        Where tokens are drawn, these are tested, so that their number is what gives most tokens a second. What a greedy
        draft has beside it is looked at if one could be worth its test, and now and then.
        """
        now = self._round
        asks = [ask for ask in stage.asks if ask.count and not ask.is_probe and ask.req.tree_size]
        if not asks or now.is_shorter:
            return
        most = trees.MAX_BESIDE * sum([ask.count for ask in asks])
        spent = stage.draft_seconds([ask.count for ask in stage.asks])
        seconds = [target + spent for target in now.verify(most)]
        found = []
        for i, ask in enumerate(asks):
            if ask.req.sampler.is_greedy:
                ask.req.siblings = self._choose_copy_branches(ask.memory, seconds) * ask.most
            else:
                beside = trees.list_possible_siblings(ask.gains[: ask.count], ask.memory.drafter.branches.failure_rates)
                found += [trees.BranchCandidate(gain, i, depth) for gain, depth in beside]
        for _, i, depth in trees.select_worth_testing(found, now.expected, seconds):
            req, count = asks[i].req, asks[i].count
            siblings = list(req.siblings or [0] * count)
            if sum(siblings) + count < req.tree_size:
                siblings[depth] += 1
                now.drafted += 1
            req.siblings = tuple(siblings)

    def allow_copy_branches(self, drafter: str, requests: "Sequence[Request]", limits: Sequence[int]) -> None:
        """Say whether copies are looked at for branches; called before they are made."""
        seconds = self._round.verify(1)
        for req, limit in zip(requests, limits, strict=True):
            if req.adaptive and limit:
                req.siblings = (
                    self._choose_copy_branches(self._memory(drafter, req), seconds) * limit if req.tree_size else ()
                )

    def _choose_copy_branches(self, memory: StageMemory, seconds: Sequence[float]) -> tuple[int, ...]:
        """Branches beside a token that are looked at: if one could be worth its test, and now and then."""
        likeliest = trees.BranchCandidate(trees.best_branch_chance(memory.drafter.branches.failure_rates), 0, 0)
        worth = trees.select_worth_testing([likeliest], self._round.expected, seconds)
        return (trees.MAX_BESIDE,) if worth or self._round.number % trees.LOOKED_EVERY == 0 else ()

    def choose_branches(self, requests: "Sequence[Request]", proposals: Sequence[Proposal]) -> list[Proposal]:
        """Drafts with the branches worth their tests; all that were drawn stay, and all of requests not adaptive."""
        now, found, best = self._round, list[trees.BranchCandidate](), list(proposals)
        drafted, expected = 0, float(now.load.num_ready)
        for i, (req, proposal) in enumerate(zip(requests, proposals, strict=True)):
            memory = self._stages.get(req, _NO_STAGES).get(proposal.drafter)
            drafted += len(proposal.tokens)
            if not req.adaptive or memory is None or not proposal.tokens:
                drafted += len(proposal.branches)
                continue
            memory.looked = proposal if proposal.branches else None
            reach = memory.acceptance.reach(memory.slots[: proposal.num_own])
            expected += sum(reach)
            if any(branch.distribution is not None for branch in proposal.branches):
                drafted += len(proposal.branches)
            elif proposal.branches:
                best[i] = proposal._replace(branches=())
                reached = trees.compute_token_reach(proposal, reach)
                found += trees.candidates(i, proposal, reached, memory.drafter.branches.failure_rates)
        if not found:
            return best
        now.drafted = drafted
        spent = sum([self._draft_seconds(name, requests, proposals) for name in {each.drafter for each in proposals}])
        seconds = [target + spent for target in now.verify(len(found))]
        kept = [set[int]() for _ in requests]
        for _, i, place in trees.select_worth_testing(found, expected, seconds):
            if len(kept[i]) < requests[i].tree_size - proposals[i].num_own:
                kept[i].add(place)
        return [
            trees.keep_branches(proposals[i], places) if places else proposal
            for i, (proposal, places) in enumerate(zip(best, kept, strict=True))
        ]

    def _draft_seconds(self, drafter: str, requests: "Sequence[Request]", proposals: Sequence[Proposal]) -> float:
        """Seconds that the drafts of one drafter took, by what is known of its steps."""
        if drafter not in self._known:
            return 0.0
        lengths = [proposal.num_own for proposal in proposals if proposal.drafter == drafter]
        return Stage(self._round, drafter, self._known[drafter], requests, []).draft_seconds(lengths)

    def cut(
        self, drafter: str, requests: "Sequence[Request]", proposals: Sequence[Proposal], limits: Sequence[int]
    ) -> list[Allowed]:
        """How much of each draft, of up to ``limits[i]`` tokens, is worth testing, where drafting costs nothing."""
        now, asks = self._round, []
        allowed = [
            Allowed(limit, "goodput" if req.adaptive else "fixed") for req, limit in zip(requests, limits, strict=True)
        ]
        for i, (req, proposal) in enumerate(zip(requests, proposals, strict=True)):
            if not req.adaptive or proposal.distributions is not None:  # what was drawn is tested, all of it
                now.drafted += proposal.num_own
            elif proposal.num_own:
                asks.append(self._make_candidate(i, drafter, req, proposal.num_own, proposal.match_length))
        stage = Stage(now, drafter, self._known[drafter], requests, asks)
        for rule in COPIED:
            rule(stage)
        for ask in asks:
            if ask.count and self._is_beaten_by_later(stage, ask):
                ask.count = 0
            place = len(proposals[ask.index].forced)
            ask.memory.shadow = None if ask.count else (proposals[ask.index].tokens[place], place)
            ask.memory.copied = now.number, ask.gains
            allowed[ask.index] = Allowed(ask.count, "goodput" if ask.count else "bypass", 1.0 + ask.expected)
        now.grant(asks)
        return allowed

    def promises(self, request: "Request", asked: Sequence[Asked]) -> tuple[Promise, ...]:
        """What plain decoding and each stage of a plan that was considered promise now; nothing is decided by it."""
        allowed = {each.drafter: each.lookahead for each in asked}
        found = [Promise("", 0, 1.0, self._round.plain_rate())]
        for name, own in request.draft_plan:
            stage = self._stage_of(name, request, own)
            rates = [] if stage is None else stage.rates(stage.asks[0])
            if each := [Promise(name, k, *both) for k, both in enumerate(rates, 1)]:
                count = 0 if request.sure is not None else allowed.get(name, 0)  # ends by itself
                found.append(each[count - 1] if count else max(each, key=lambda promise: promise.tokens_per_second))
        return tuple(found)

    def drafted(
        self, drafter: str, requests: "Sequence[Request]", proposals: Sequence[Proposal], seconds: float
    ) -> None:
        """A drafter that costs time was called for these requests; its drafts took so long."""
        now, rows = self._round, self._round.load.num_rows
        reading = now.catching_up.get(drafter, 0.0)
        drafting = [req for req, proposal in zip(requests, proposals, strict=True) if proposal.num_own]
        if not drafting or not (self._is_watching or (self._learns and reading)):
            return
        if any(proposal.error is not None for proposal in proposals):
            return
        lengths = [proposal.num_own for proposal in proposals]
        step = Stage(now, drafter, self._known[drafter], drafting, []).draft_step_seconds(len(drafting), mended=False)
        promised = sum([step[sum([length > depth for length in lengths])] for depth in range(max(lengths))])
        if reading <= _HARDLY * promised:
            now.draft_seconds[drafter] = promised + reading, seconds
        else:
            now.readings[drafter] = reading, self._learned.draft_ratio(drafter, rows) * promised, seconds

    def record_verify_seconds(self, drafted: int, seconds: float) -> None:
        """A round is over, and all its drafts were observed; verification of ``drafted`` draft tokens took so long."""
        now, rows = self._round, self._round.load.num_rows
        watched = self._is_watching or now.draft_seconds or now.readings
        if watched and not now.load.prompt_tokens:
            taken = RoundSeconds(rows, drafted, now.promised, seconds, now.draft_seconds)
            for name, (reading, steps, all_of_it) in now.readings.items():
                mended = self._learned.draft_ratio(make_reading_key(name), rows) * reading
                now.draft_seconds[make_reading_key(name)] = reading, all_of_it * mended / (mended + steps)
            self._learned.observe(taken)
        self._learned.adopt()

    def observe(self, request: "Request", proposal: Proposal, before: int, accepted: int, *, rejected: bool) -> None:
        """How many of its tests the chain of an adaptive request's draft passed, and whether one failed.

        Called once a round. Its tokens, of which there were ``before``, already end with what the round gave it.
        """
        own, failed = proposal.count_own_tests(accepted)
        for name, memory in self._stages.get(request, _NO_STAGES).items():
            if memory.shadow is not None:
                token, place = memory.shadow
                if request.finish_reason is None and place <= accepted:
                    passed = request.tokens[before + place] == token
                    memory.acceptance.observe(memory.slots, int(passed), rejected=not passed)
                memory.shadow = None
            if memory.looked is not None and request.finish_reason is None:
                trees.observe(memory.drafter.branches, request, memory.looked, before)
            memory.looked = None
            if name == proposal.drafter:
                is_new = memory.drafter.is_unknown  # who finds out is not to blame
                memory.acceptance.observe(memory.slots, own, rejected=rejected and failed)
                memory.sure.observe(own, rejected=rejected and failed)
                plain, (reading, each) = self._round.plain, memory.price
                gained = own / self._round.load.num_ready - each * proposal.num_own / plain
                memory.drafter.account.settle(0.0 if is_new else reading / plain, gained)
                memory.record_test(self._round.number, passed=own > 0)
                if self._known[name].traits.has_own_cache:
                    memory.read = min(before + min(proposal.last_own, accepted), len(request.tokens) - 1)

    def record_pause(self, request: "Request") -> None:
        """A request was paused: what drafters had read of it may be gone."""
        self._quiet.clear()
        for memory in self._stages.get(request, _NO_STAGES).values():
            memory.read = 0

    @property
    def _is_watching(self) -> bool:
        now, number = self._round, self._round.number
        return self._learns and (number <= _WATCHED or not number % _WATCH_EVERY or now.is_shorter or now.has_probe)

    def _make_candidate(
        self, index: int, drafter: str, req: "Request", limit: int, matched: int | None = None
    ) -> DraftCandidate:
        """What a request may draft, and what is expected of it. ``matched``: tokens before a copy."""
        most = min(limit, self._known[drafter].traits.max_lookahead or limit)
        memory = self._memory(drafter, req)
        memory.slots = self._positions
        if matched is not None:
            memory.slots = self._matches[min(matched, MAX_MATCH) :][:limit]
        return DraftCandidate(index, req, memory, most, memory.acceptance.reach(memory.slots[:most]))

    def _memory(self, drafter: str, req: "Request") -> StageMemory:
        stages = self._stages.setdefault(req, {})
        if drafter not in stages:
            key, traits = f"{drafter}/{req.sampler.grammar is not None}/{req.acceptance}", self._known[drafter].traits
            if key not in self._drafters:
                slots = NUM_MATCH_SLOTS if traits.is_free else len(self._positions)
                guess, kept = MODEL_GUESS if traits.has_own_cache else GUESS, self._learned.drafters.get(key)
                self._drafters[key] = self._learned.drafters[key] = DrafterMemory(slots, guess, kept=kept)
            stages[drafter] = StageMemory(self._drafters[key], self._round.number)
        return stages[drafter]

    def _stage_of(self, drafter: str, req: "Request", own: int) -> Stage | None:
        """A drafter as one request may use it, or has; None if nothing is known of that."""
        memory, known = self._stages.get(req, _NO_STAGES).get(drafter), self._known[drafter]
        if memory is None or not (req.num_generated or known.cost is None):
            return None
        most = min(own, req.room_for_drafts, known.traits.max_lookahead or own)
        number, gains = memory.copied
        if known.cost is not None:
            gains = memory.acceptance.reach(self._positions[:most])
        elif number != self._round.number:
            return None
        return Stage(self._round, drafter, known, [req], [DraftCandidate(0, req, memory, most, list(gains[:most]))])

    def _is_beaten_by_later(self, copy: Stage, ask: DraftCandidate) -> bool:
        """Whether a drafter that comes later in the plan promises more tokens a second than a copy that is there."""
        *_, (_, copied) = copy.rates(ask, gains=ask.gains[: ask.count])
        names = [name for name, _ in ask.req.draft_plan]
        for name, own in ask.req.draft_plan[names.index(copy.name) + 1 :]:
            if self._known[name].cost is not None and ask.req.num_generated:
                self._memory(name, ask.req)
                later = self._stage_of(name, ask.req, own)
                if later is not None and any(rate > copied for _, rate in later.rates(later.asks[0])):
                    return True
        return False

    def _record_quiet(self, stage: Stage) -> None:
        """Remember that no drafter drafts."""
        drafter, asks = stage.name, stage.asks
        if self._round.is_shorter or any(ask.count or not ask.req.num_generated for ask in asks):
            self._quiet.pop(drafter, None)
            return
        for ask in asks:
            best = max([rate for _, rate in stage.rates(ask)], default=0.0) * self._round.plain
            told = ask.req.stats.unused.get(drafter, (0.0, 0.0))
            ask.req.stats.unused[drafter] = max(told, (best, ask.memory.drafter.account.balance))
        number = self._round.number
        until = min([number + _QUIET, *[max(ask.memory.due, number + _REFUSED) for ask in asks]])
        self._quiet[drafter] = self._make_decision_key(drafter), until, WeakSet(ask.req for ask in asks)

    def _is_quiet(self, drafter: str, waiting: "Sequence[Request]") -> bool:
        """Whether it was decided in the same circumstances that no drafter drafts: most rounds of a useless one."""
        circumstances, until, members = self._quiet.get(drafter, ((), 0, ()))
        if self._round.number >= until or circumstances != self._make_decision_key(drafter):
            return False
        return all(req in members for req in waiting)

    def _make_decision_key(self, drafter: str) -> tuple[int, ...]:
        """What a decision depends on besides the request's own tests."""
        load, version = self._round.load, self._learned.version
        seen = sum([each.shared.version for key, each in self._drafters.items() if key.split("/")[0] == drafter])
        context = load.kv_entries // (load.num_rows * _BUCKET)
        return seen, load.num_rows, load.num_tokens, load.num_soon, context, self._round.drafted, version

    def _find_length_reason(self, drafter: str, ask: DraftCandidate, limit: int) -> LengthReason:
        own = next(lookahead for name, lookahead in ask.req.draft_plan if name == drafter)
        return "room" if ask.count == ask.most and limit < own else "goodput"
