"""The goodput controller: how far to draft for the most expected tokens per second of the whole step.

For every round it weighs, for sequence i with K_i draft tokens,

::

    goodput = sum_i E_i(K_i) / (target step of B + sum_i K_i tokens + draft steps)
    E_i(K)  = 1 + a_i1 + a_i1 a_i2 + … + a_i1 … a_iK

with a_ij the chance that the j-th draft token passes if those before it did, as measured by ``draft_acceptance``, and
the seconds as the cost curves say. The best K_i are found by ``lookahead_allocation``; K_i = 0 for all is plain
decoding, for which no drafter is called. A drafter that is bypassed is tried again now and then (``draft_probing``),
and a draft model that has not read a sequence is not started where it is not expected to pay for reading it.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts, RoundSeconds, reading_of
from specexport_runtime.errors import SpecexportError
from specexport_runtime.lookahead.acceptance import GUESS, MAX_MATCH, MODEL_GUESS, NUM_MATCH_SLOTS, match_slots
from specexport_runtime.lookahead.allocation import StepTimes, allocate
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.lookahead.memory import DrafterMemory, StageMemory
from specexport_runtime.lookahead.plain_spell import PlainSpell
from specexport_runtime.lookahead.step_times import StepTimeTables
from specexport_runtime.sequences.records import Allowed, Asked, LengthReason, Promise, Proposal, StepLoad

if TYPE_CHECKING:
    from specexport_runtime.costs.tune_profile import TuneProfile
    from specexport_runtime.sequences.sequence import Sequence

_HORIZON = 64  # rounds over which the cost of reading a prompt is spread, at most
_SCOUTS, _SCOUT_LOOKAHEAD, _PROMISING = 2, 2, 0.85
"""While nobody knows whether a drafter pays, so many sequences find out, with drafts of at least so many tokens: if it
promises nearly as much as plain decoding, at the acceptance that is guessed. Those that have least to read for it."""


_MARGIN = 0.02
"""Drafting must promise so much more than plain decoding: cost curves are no better than that."""

_WORTH_READING = 0.1
"""The same before a draft model reads a sequence while a batch fills: what is read in vain is lost."""

_WATCHED, _WATCH_EVERY = 64, 4
"""So many rounds of an engine are compared with the curves, later every fourth: it takes a tenth of a millisecond."""

_BYPASS = Allowed(0, "bypass", 1.0)
_NO_STAGES: dict[str, StageMemory] = {}


class GoodputLength:
    """A ``DraftLength`` that maximizes expected tokens per second.

    With a tune profile, K is at most what the profile's table says for the number of rows and the sequence's length:
    the table knows what is best on average on the user's prompts, the controller goes below it where a sequence does
    worse than average.

    Args:
        curves: what steps cost; fixed when the engine is loaded.
        lookahead: largest K.
        profile: bounds K from above.
        drafters: the drafters that plans of adaptive sequences may name.
        learned: mends the curves by what rounds took; None takes them as they are.
    """

    def __init__(
        self,
        curves: CostCurves,
        lookahead: int,
        profile: "TuneProfile | None" = None,
        *,
        drafters: Mapping[str, WeighedDrafter],
        learned: LearnedCosts | None = None,
    ) -> None:
        self.curves, self.profile = curves, profile
        self._learns = self._watching = learned is not None
        self._learned = learned or LearnedCosts()
        self._known = dict(drafters)
        self._stages: WeakKeyDictionary[Sequence, dict[str, StageMemory]] = WeakKeyDictionary()
        self._times = StepTimeTables(curves, self._learned)
        self._positions = list(range(lookahead))
        self._matches = match_slots(lookahead)
        self._no_rows = [0] * lookahead
        self._drafters: dict[tuple[str, bool], DrafterMemory] = {}
        """By name, and apart for sequences with a grammar: what JSON is like tells nothing of free text."""
        self._round = 0
        self._load = StepLoad(1, 1, 1, 0)
        self._full: StepLoad | None = None
        self._drafted = 0
        self._expected = 0.0
        self._plain = PlainSpell()
        self._is_shorter = False
        """Drafts of this round were made shorter in order to learn: that nobody drafts is no reason to stay so."""
        self._catching_up: dict[str, float] = {}
        self._draft_seconds: dict[str, tuple[float, float]] = {}
        self._copies: dict[tuple[Sequence, str], list[float]] = {}
        """For a trace: how likely each token of a copy that was found in this round is to be accepted."""
        self._seen_sizes: set[tuple[str, int, int]] = set()

    def begin_round(self, load: StepLoad) -> None:
        """See ``DraftLength.begin_round``."""
        self._round += 1
        self._load, self._drafted, self._expected = load, 0, float(load.num_ready)
        self._full = load.when_full()
        self._is_shorter = False
        self._watching = self._learns and (self._round <= _WATCHED or not self._round % _WATCH_EVERY)
        self._catching_up.clear()
        self._copies.clear()
        self._draft_seconds.clear()
        plain = self._times.target(load, 0, 0)[0]
        for drafter in self._drafters.values():
            drafter.budget.earn(plain)

    def begun(self, num_forced: int) -> None:
        """See ``DraftLength.begun``."""
        self._drafted += num_forced
        self._expected += num_forced

    def allow(self, drafter: str, sequences: "Seq[Sequence]", limits: Seq[int]) -> list[Allowed]:
        """See ``DraftLength.allow``."""
        if self._is_bypassed(drafter, sequences):
            return [_BYPASS] * len(sequences)
        allowed = [Allowed(0 if seq.adaptive else limit) for seq, limit in zip(sequences, limits, strict=True)]
        asked = [
            (i, self._stage(drafter, seq), self._bound(drafter, seq, limits[i]))
            for i, seq in enumerate(sequences)
            if limits[i] and seq.adaptive
        ]
        if not asked:
            return allowed
        fixed = [each.lookahead for each in allowed if each.lookahead]
        self._drafted += sum(fixed)
        asked = self._candidates(drafter, sequences, asked)
        gains = [stage.acceptance.reach(self._positions[:most]) for _, stage, most in asked]
        entries = [
            self._entry(drafter, sequences[i], stage, 1.0 + sum(each))
            for (i, stage, _), each in zip(asked, gains, strict=True)
        ]
        times = self._step_times(drafter, sequences, fixed, sum([len(each) for each in gains]) + 1)
        counts, _ = allocate(gains, entries, self._expected, times, _MARGIN)
        for j, (i, stage, most) in enumerate(asked):
            if self._is_unknown(drafter, stage) and self._is_promising(drafter, sequences[i], stage, most):
                counts[j] = max(counts[j], min(most, _SCOUT_LOOKAHEAD))
        if self._learns and self._learned.wants_shorter(self._load.num_rows):
            counts, self._watching = [count // 2 for count in counts], True
            self._is_shorter = True
        probes = self._probe(drafter, sequences, asked, counts, times)
        circumstances = self._circumstances(drafter)
        for i, seq in enumerate(sequences):
            if limits[i] and seq.adaptive:
                allowed[i] = _BYPASS
        for j, (i, stage, most) in enumerate(asked):
            stage.slots = self._positions
            stage.bypassed = None if counts[j] or self._is_shorter else circumstances
            if counts[j]:
                if reading := self._reading_seconds(drafter, sequences[i], stage):
                    self._catching_up[drafter] = self._catching_up.get(drafter, 0.0) + reading
                reason = "probe" if j in probes else self._reason(drafter, sequences[i], counts[j], limits[i], most)
                allowed[i] = Allowed(counts[j], reason, 1.0 + sum(gains[j][: counts[j]]))
        self._note(counts, gains)
        return allowed

    def cut(
        self, drafter: str, sequences: "Seq[Sequence]", proposals: Seq[Proposal], limits: Seq[int]
    ) -> list[Allowed]:
        """See ``DraftLength.cut``."""
        allowed = [
            Allowed(limit, "goodput" if seq.adaptive else "fixed") for seq, limit in zip(sequences, limits, strict=True)
        ]
        asked = []
        for i, (seq, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            count = proposal.num_own
            if not seq.adaptive:
                self._drafted += count
            elif count:
                stage = self._stage(drafter, seq)
                matched = min(proposal.match_length, MAX_MATCH)
                stage.slots = self._matches[matched : matched + count]
                asked.append((i, stage, self._bound(drafter, seq, count)))
        if not asked:
            return allowed
        gains = [stage.acceptance.reach(stage.slots[:most]) for _, stage, most in asked]
        table = self._times.target(self._load, self._drafted, sum([most for _, _, most in asked]))
        counts, _ = allocate(gains, [0.0] * len(asked), self._expected, StepTimes(table, None, ()), _MARGIN)
        for j, (i, _, _) in enumerate(asked):
            if counts[j] and self._yields(drafter, sequences[i], gains[j][: counts[j]]):
                counts[j] = 0
        for j, (i, stage, most) in enumerate(asked):
            if sequences[i].trace is not None:
                self._copies[sequences[i], drafter] = gains[j]
            count, whole, place = counts[j], proposals[i].num_own, len(proposals[i].forced)
            stage.shadow = None if count else (proposals[i].tokens[place], place)
            reason = self._reason(drafter, sequences[i], count, whole, most)
            allowed[i] = Allowed(count, reason, 1.0 + sum(gains[j][:count]))
        self._note(counts, gains)
        return allowed

    def _yields(self, drafter: str, seq: "Sequence", gains: Seq[float]) -> bool:
        """Whether a drafter that comes later in the plan promises more tokens a second than a copy that is there.

        Args:
            drafter: who copied.
            seq: for whom.
            gains: probability that the copy is accepted up to each of its tokens.
        """
        names = [name for name, _ in seq.draft_plan]
        rows = self._load.num_rows
        copied = (1.0 + sum(gains)) / self._times.target(self._load, 0, rows * len(gains))[rows * len(gains)]
        for name, own in seq.draft_plan[names.index(drafter) + 1 :]:
            if self._known[name].cost is None or not seq.num_generated:
                continue
            stage = self._stage(name, seq)
            if any(rate > copied for _, rate in self._promised(name, seq, stage, own)):
                return True
        return False

    def _promised(
        self, drafter: str, seq: "Sequence", stage: StageMemory, own: int, load: StepLoad | None = None
    ) -> Iterator[tuple[float, float]]:
        """Tokens, and tokens a second, that a draft of one token promises, one of two and so on.

        As if all rows of the step did the same: the share of each is then what it costs. ``load`` is another step than
        this one.
        """
        load = load or self._load
        known, rows = self._known[drafter], load.num_rows
        most = self._bound(drafter, seq, min(own, seq.room_for_drafts))
        if known.cost is None:
            gains, each = self._copies.get((seq, drafter), [])[:most], 0.0
        else:
            gains = stage.acceptance.reach(self._positions[:most])
            each = self._times.draft(drafter, known.cost, [seq], load, rows)[rows]
        seconds, expected = self._entry(drafter, seq, stage, 1.0 + sum(gains)) * rows, 1.0
        target = self._times.target(load, 0, rows * len(gains))
        for depth, gain in enumerate(gains, 1):
            seconds, expected = seconds + each, expected + gain
            yield expected, expected / (target[rows * depth] + seconds)

    def _waits(self, drafter: str, seq: "Sequence", stage: StageMemory, most: int) -> bool:
        """Whether a drafter that has not read a sequence would pay for that only until other prompts have been read."""
        if self._full is None or stage.known or not self._known[drafter].traits.has_own_cache:
            return False
        plain = 1.0 / self._times.target(self._full, 0, 0)[0]
        promised = self._promised(drafter, seq, stage, most, self._full)
        return not any(rate > (1 + _WORTH_READING) * plain for _, rate in promised)

    def _is_promising(self, drafter: str, seq: "Sequence", stage: StageMemory, most: int) -> bool:
        """Whether a drafter that is not known yet may well pay; others are tried in probes only."""
        load = self._full or self._load
        plain = 1.0 / self._times.target(load, 0, 0)[0]
        rates = (rate for _, rate in self._promised(drafter, seq, stage, min(most, _SCOUT_LOOKAHEAD), load))
        return any(rate > _PROMISING * plain for rate in rates)

    def promises(self, sequence: "Sequence", asked: Seq[Asked]) -> tuple[Promise, ...]:
        """See ``DraftLength.promises``."""
        allowed = {each.drafter: each.lookahead for each in asked}
        found = [Promise("", 0, 1.0, 1.0 / self._times.target(self._load, 0, 0)[0])]
        for name, own in sequence.draft_plan:
            stage = self._stages.get(sequence, _NO_STAGES).get(name)
            if stage is None or not (sequence.num_generated or self._known[name].cost is None):
                continue
            each = [Promise(name, k, *both) for k, both in enumerate(self._promised(name, sequence, stage, own), 1)]
            count = allowed.get(name, 0)
            if each:
                found.append(each[count - 1] if count else max(each, key=lambda promise: promise.tokens_per_second))
        return tuple(found)

    def stays_plain(self, sequences: "Seq[Sequence]") -> bool:
        """See ``DraftLength.stays_plain``."""
        return self._plain.holds(self._round, self._load[:3], sequences)

    def note_plain(self, sequences: "Seq[Sequence]") -> None:
        """See ``DraftLength.note_plain``."""
        if not self._is_shorter:
            self._plain.begin(self._round, self._load[:3], sequences, self._quiet_stage)

    def drafted(self, drafter: str, sequences: "Seq[Sequence]", proposals: Seq[Proposal], seconds: float) -> None:
        """See ``DraftLength.drafted``."""
        cost, rows = self._known[drafter].cost, self._load.num_rows
        reading = self._catching_up.get(drafter)
        if not (self._watching or (self._learns and reading)) or cost is None:
            return
        if any(proposal.error is not None for proposal in proposals):
            return
        pairs = [(seq, proposal) for seq, proposal in zip(sequences, proposals, strict=True) if proposal.num_own]
        if not pairs or not self._is_known_size(drafter, rows):
            return
        lengths = [proposal.num_own for _, proposal in pairs]
        counts = [sum([length > depth for length in lengths]) for depth in range(max(lengths))]
        promised = self._times.draft_steps(drafter, cost, [seq for seq, _ in pairs], self._load, counts)
        if reading is None:
            self._draft_seconds[drafter] = promised, seconds
        elif (level := self._learned.level(rows)) is not None:
            rest = seconds - level * self._learned.draft_ratio(drafter, rows) * promised
            self._draft_seconds[reading_of(drafter)] = reading, max(rest, 0.0)

    def restarted(self, sequence: "Sequence") -> None:
        """See ``DraftLength.restarted``."""
        for stage in self._stages.get(sequence, _NO_STAGES).values():
            stage.known, stage.bypassed = 0, None

    def took(self, sequences: "Seq[Sequence]", drafted: int, seconds: float) -> None:
        """See ``DraftLength.took``."""
        load = self._load
        watched = (self._watching or self._draft_seconds) and not load.prompt_tokens
        if watched and self._is_known_size("", load.num_rows, drafted.bit_length()):
            base = self._times.with_drafts(load, 0)
            extra = self._times.with_drafts(load, drafted) - base
            self._learned.observe(RoundSeconds(load.num_rows, base, extra, seconds, dict(self._draft_seconds)))
        # Random numbers that are still to be used must not meet times: nothing changes while a sampled sequence has
        # its lengths chosen.
        if self._learned.is_due and all(seq.sampler.is_greedy for seq in sequences if seq.adaptive):
            self._learned.adopt()
            self._times.forget()
            self._plain = PlainSpell()

    def _is_known_size(self, name: str, rows: int, width: int = 0) -> bool:
        """Whether steps of such a size were seen before: the first one touches new memory, and tells nothing."""
        if (name, rows, width) in self._seen_sizes:
            return True
        self._seen_sizes.add((name, rows, width))
        return False

    def observe(self, sequence: "Sequence", proposal: Proposal, accepted: int, *, rejected: bool) -> None:
        """See ``DraftLength.observe``."""
        stages = self._stages.get(sequence, {})
        before = len(sequence.tokens) - accepted - 1  # wrong for a sequence that ended within its draft
        own, failed = proposal.own_tests(accepted)
        for name, stage in stages.items():
            if stage.shadow is not None:
                token, place = stage.shadow
                if sequence.finish_reason is None and place <= accepted:
                    passed = sequence.tokens[before + place] == token
                    stage.acceptance.observe(stage.slots, int(passed), rejected=not passed)
                stage.shadow = None
            if name == proposal.drafter:
                if stage.timer.is_probing and own:
                    stage.acceptance.fade()  # it became better: what it did long ago tells little
                stage.acceptance.observe(stage.slots, own, rejected=rejected and failed)
                stage.timer.note(self._round, passed=own > 0)
                if self._known[name].traits.has_own_cache:
                    stage.known = min(before + proposal.last_own, len(sequence.tokens) - 1)

    def _circumstances(self, drafter: str) -> tuple[int, ...]:
        """What a decision depends on besides the sequence's own tests."""
        rows, context = self._load.num_rows, self._times.context(self._load)
        version = sum([known.shared.version for (name, _), known in self._drafters.items() if name == drafter])
        soon = self._load.num_soon
        return version, rows, context, self._load.num_tokens, soon, self._drafted, self._learned.version

    def _is_bypassed(self, drafter: str, sequences: "Seq[Sequence]") -> bool:
        """Whether it was decided in the same circumstances that nobody drafts: most rounds of a useless drafter."""
        now, circumstances = self._round, self._circumstances(drafter)
        for seq in sequences:
            stage = self._stages.get(seq, _NO_STAGES).get(drafter) if seq.adaptive else None
            if stage is None or not stage.stays_bypassed(circumstances, now):
                return False
        return True

    def _probe(
        self,
        drafter: str,
        sequences: "Seq[Sequence]",
        asked: Seq[tuple[int, StageMemory, int]],
        counts: list[int],
        times: StepTimes,
    ) -> set[int]:
        """Let sequences that draft nothing try one token, if it is time and the budget allows; which of ``asked``."""
        probes: set[int] = set()
        for j, (i, stage, most) in enumerate(asked):
            if counts[j] or not most or not stage.timer.is_due(self._round, early=bool(probes)):
                continue
            rows, taken = times.rows[0] + sum([count > 0 for count in counts]), sum(counts)
            cost = times.target[taken + 1] - times.target[taken]
            if times.draft is not None:
                cost += times.draft[rows + 1] - times.draft[rows]
            cost += self._catch_up(drafter, sequences[i], stage) + self._each_round(drafter)
            stage.probe_seconds = cost
            if stage.drafter.budget.spend(cost):
                counts[j] = 1
                probes.add(j)
                stage.start_probe()
        return probes

    def _note(self, counts: Seq[int], gains: Seq[Seq[float]]) -> None:
        """What was allowed counts for the stages that are asked after it in this round."""
        for count, each in zip(counts, gains, strict=True):
            self._drafted += count
            self._expected += sum(each[:count])

    def _stage(self, drafter: str, seq: "Sequence") -> StageMemory:
        stages = self._stages.get(seq)
        if stages is None:
            stages = self._stages[seq] = {}
        stage = stages.get(drafter)
        if stage is None:
            key = drafter, seq.sampler.grammar is not None
            known = self._drafters.get(key)
            if known is None:
                traits = self._known[drafter].traits
                slots = NUM_MATCH_SLOTS if traits.is_free else len(self._positions)
                guess = MODEL_GUESS if traits.has_own_cache else GUESS
                known = self._drafters[key] = DrafterMemory(slots, guess)
            stage = stages[drafter] = StageMemory(known, self._round)
        return stage

    def _quiet_stage(self, seq: "Sequence", drafter: str) -> StageMemory | None:
        """What is remembered of a drafter that need not be asked in every round; free ones must be."""
        return None if self._known[drafter].traits.is_free else self._stages.get(seq, _NO_STAGES).get(drafter)

    def _bound(self, drafter: str, seq: "Sequence", limit: int) -> int:
        own = self._known[drafter].traits.max_lookahead
        limit = limit if own is None else min(limit, own)
        if self.profile is None:
            return limit
        most = self.profile.lookahead(drafter, self._load.num_rows, len(seq.tokens))
        return limit if most is None else min(limit, most)

    def _reason(self, drafter: str, seq: "Sequence", count: int, limit: int, most: int) -> LengthReason:
        if not count:
            return "bypass"
        if count < most:
            return "goodput"
        if most < limit:
            return "tuned"
        own = next(lookahead for name, lookahead in seq.draft_plan if name == drafter)
        return "room" if limit < own and not self._known[drafter].traits.is_free else "goodput"

    def _candidates(
        self, drafter: str, sequences: "Seq[Sequence]", asked: list[tuple[int, StageMemory, int]]
    ) -> list[tuple[int, StageMemory, int]]:
        """Those that may draft: prompts are read first, and only a few scout out a drafter that nobody knows.

        What pays for a few rows may not pay for many: who has yet to read a prompt with a draft model looks ahead.
        """
        asked = [each for each in asked if each[2] and sequences[each[0]].num_generated]
        asked = [each for each in asked if not self._waits(drafter, sequences[each[0]], *each[1:])]
        if len(asked) <= _SCOUTS or not all(self._is_unknown(drafter, stage) for _, stage, _ in asked):
            return asked
        return sorted(asked, key=lambda each: len(sequences[each[0]].tokens) - each[1].known)[:_SCOUTS]

    def _is_unknown(self, drafter: str, stage: StageMemory) -> bool:
        """Whether too little was seen of a drafter to know if it pays."""
        return stage.drafter.is_unknown or (self._learns and self._learned.is_unknown(drafter))

    def _entry(self, drafter: str, seq: "Sequence", stage: StageMemory, expected: float) -> float:
        """Seconds that a draft costs whatever its length.

        Those of catching up are spread over the rounds that may profit from it: each gives ``expected`` tokens.
        """
        catch_up = self._catch_up(drafter, seq, stage)
        spread = catch_up and catch_up / min(max(seq.room_for_drafts / expected, 1.0), _HORIZON)
        return spread + self._each_round(drafter)

    def _each_round(self, drafter: str) -> float:
        """What is paid anew in every round."""
        cost = self._known[drafter].cost
        return 0.0 if cost is None else cost.round_seconds(max(self._load.num_rows, 1))

    def _catch_up(self, drafter: str, seq: "Sequence", stage: StageMemory) -> float:
        """Seconds for reading what the drafter has missed; 0 if it has nothing to read with."""
        seconds = self._reading_seconds(drafter, seq, stage)
        return seconds and seconds * self._learned.reading_ratio(drafter, self._load.num_rows)

    def _reading_seconds(self, drafter: str, seq: "Sequence", stage: StageMemory) -> float:
        """The same, as the curve says."""
        known = self._known[drafter]
        if known.cost is None or not known.traits.has_own_cache:
            return 0.0
        return known.cost.catch_up_seconds(len(seq.tokens) - stage.known)

    def _step_times(self, drafter: str, sequences: "Seq[Sequence]", fixed: Seq[int], most: int) -> StepTimes:
        rows = self._no_rows
        if fixed:
            rows = [sum([limit > depth for limit in fixed]) for depth in self._positions]
        cost = self._known[drafter].cost
        if cost is None:
            raise SpecexportError(f"nobody knows what a step of drafter {drafter!r} costs.")
        table = self._times.draft(drafter, cost, sequences, self._load, len(sequences))
        return StepTimes(self._times.target(self._load, self._drafted, most), table, rows)
