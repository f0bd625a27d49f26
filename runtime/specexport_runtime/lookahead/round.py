"""What the controller knows of a round: its step, what was allowed so far, what more would cost and give."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts, make_reading_key
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.lookahead.memory import StageMemory
from specexport_runtime.requests.records import StepLoad

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request


def step_load(
    drafting: "Sequence[Request]", prompts: "Sequence[Request]", prompt_tokens: int, num_soon: int = 0
) -> StepLoad:
    """What a step holds before anything is drafted; of ``prompts``, the ones that end in it are in ``drafting`` too."""
    busy = [*drafting, *(req for req in prompts if req not in drafting)] if prompts else drafting
    entries = sum([len(req.tokens) for req in busy])
    return StepLoad(len(busy), len(busy) - len(prompts) + prompt_tokens, len(drafting), entries, num_soon)


@dataclass
class Round:
    """One round, while stage after stage of the draft plans is asked."""

    number: int
    load: StepLoad  # the target's step before anything is drafted
    curves: CostCurves  # what steps cost by size
    learned: LearnedCosts  # by what that is mended
    drafted: int = 0  # draft tokens that were allowed so far
    expected: float = 0.0  # tokens that the round is expected to give so far
    is_shorter: bool = False  # drafts were made shorter to learn: a round without drafts is no reason to stay so
    has_probe: bool = False  # it is looked at, whatever the number of the round
    catching_up: dict[str, float] = field(default_factory=dict)  # promised seconds of what a drafter reads first
    draft_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # promised and real ones of its steps
    readings: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # promised, steps, and all of it

    @cached_property
    def plain(self) -> float:
        """Seconds of decoding without drafts."""
        return self.promised(0, self.load.decoding)

    @cached_property
    def _reading(self) -> float:
        """Seconds that the step's prompts add."""
        return self.promised(0) - self.plain

    def promised(self, drafted: float, load: StepLoad | None = None) -> float:
        """Seconds of the target's step with so many draft tokens, by size."""
        step = load or self.load
        return self.curves.target.seconds(step.num_tokens + drafted, step.num_rows, step.kv_entries)

    def verify(self, most: int, load: StepLoad | None = None) -> list[float]:
        """Seconds of decoding, prompts of the step included, with 0 … ``most`` draft tokens more than there are."""
        ratio, already = self.learned.extra_ratio((load or self.load).num_rows), 0 if load else self.drafted
        reading = 0.0 if load else self._reading
        return [self.promised(ratio * (already + more), load) - reading for more in range(most + 1)]

    def plain_rate(self, load: StepLoad | None = None) -> float:
        """Tokens a second of each row without drafts."""
        return 1.0 / (self.promised(0, load) if load else self.plain)

    def grant(self, asks: "Iterable[DraftCandidate]") -> None:
        """What was allowed counts for the stages that are asked after it."""
        for ask in asks:
            self.drafted += ask.count
            self.expected += ask.expected


@dataclass
class DraftCandidate:
    """One request that may draft in a stage."""

    index: int  # its place among the requests of the step
    req: "Request"
    memory: StageMemory  # what is remembered of the drafter for it
    most: int  # draft tokens that it may have
    gains: list[float]  # chance that its draft is accepted up to the first, second, … token; as many as ``most``
    entry: float = 0.0  # seconds that its draft costs whatever its length
    count: int = 0  # tokens that it is allowed
    least: Sequence[float] = ()  # by its tokens so far, their chance of passing from which one more is worth its step
    goes_on: bool = False  # it may have more than it is allowed, if it is that sure
    is_probe: bool = False  # these are a cheap test
    is_out: bool = False  # it does without the drafter in this round

    @property
    def expected(self) -> float:
        """Draft tokens that are expected to be accepted of those that it is allowed."""
        return sum(self.gains[: self.count])


@dataclass
class Stage:
    """One drafter that requests of a round wait for."""

    round: Round
    name: str
    drafter: WeighedDrafter
    requests: "Sequence[Request]"  # all that draft in this round
    asks: list[DraftCandidate]  # those whose length is chosen
    fixed: Sequence[int] = ()  # rows that draft anyway, by depth (0 is the first token)

    @property
    def candidates(self) -> list[DraftCandidate]:
        """Who is not out."""
        return [ask for ask in self.asks if not ask.is_out]

    def draft_step_seconds(self, most: int, load: StepLoad | None = None, *, mended: bool = True) -> list[float]:
        """Seconds of one draft step with 0 (none at all), 1, … ``most`` rows, by size or by what was learned too."""
        load, cost = load or self.round.load, self.drafter.cost
        if cost is None:
            return [0.0] * (most + 1)
        ratio = self.round.learned.draft_ratio(self.name, load.num_rows) if mended else 1.0
        past = load.kv_entries / load.num_rows
        return [0.0, *[ratio * cost.seconds(self.requests, rows, past * rows) for rows in range(1, most + 1)]]

    def draft_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of the draft steps of rows that draft so many tokens each, besides those that draft anyway."""
        if self.drafter.cost is None:
            return 0.0
        step, fixed = self.draft_step_seconds(len(self.requests)), [*self.fixed, *[0] * max(lengths)]
        active = [fixed[depth] + sum([length > depth for length in lengths]) for depth in range(max(lengths))]
        return sum([step[rows] for rows in active])

    def catch_up(self, ask: DraftCandidate, *, mended: bool = True) -> float:
        """Seconds for reading what the drafter has missed of a request; 0 if it has nothing to read with."""
        if self.drafter.cost is None or not self.drafter.traits.has_own_cache:
            return 0.0
        rows, learned = self.round.load.num_rows, self.round.learned
        ratio = learned.draft_ratio(make_reading_key(self.name), rows) if mended else 1.0
        return ratio * self.drafter.cost.catch_up_seconds(len(ask.req.tokens) - ask.memory.read)

    @property
    def each_round(self) -> float:
        """Seconds that a draft of any length costs a request."""
        return 0.0 if self.drafter.cost is None else self.drafter.cost.round_seconds(self.round.load.num_rows)

    def price(self, ask: DraftCandidate) -> float:
        """Seconds that a draft costs whatever its length: those of catching up are spread over rounds that profit."""
        catch_up = self.catch_up(ask)
        rounds = ask.req.room_for_drafts / (1.0 + sum(ask.gains))
        return (catch_up and catch_up / max(rounds, 1.0)) + self.each_round

    def rates(
        self, ask: DraftCandidate, load: StepLoad | None = None, gains: Sequence[float] | None = None
    ) -> Iterator[tuple[float, float]]:
        """Tokens, and tokens a second, that drafts of one token, of two and so on promise, if all rows do the same."""
        step, gains = load or self.round.load.decoding, ask.gains if gains is None else gains
        rows = step.num_rows
        each = self.draft_step_seconds(rows, step)[rows]
        target = self.round.verify(rows * len(gains), step)
        seconds, expected = self.price(ask) * rows, 1.0
        for depth, gain in enumerate(gains, 1):
            seconds, expected = seconds + each, expected + gain
            yield expected, expected / (target[rows * depth] + seconds)
