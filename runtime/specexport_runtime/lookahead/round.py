"""What the controller knows of a round: its step, what was allowed so far, what more would cost and give."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts, reading_of
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.lookahead.memory import StageMemory
from specexport_runtime.sequences.records import StepLoad

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

_HORIZON = 64  # rounds over which the cost of reading a prompt is spread, at most


@dataclass
class Round:
    """One round, while stage after stage of the draft plans is asked.

    Attributes:
        number: counts the rounds.
        load: the target's step before anything is drafted.
        curves: what steps cost by size.
        learned: by what that is mended.
        drafted: draft tokens that were allowed so far.
        expected: tokens that the round is expected to give so far.
        is_shorter: drafts were made shorter in order to learn: that nobody drafts is no reason to stay so.
        catching_up: by drafter, promised seconds of what it reads before it drafts.
        draft_seconds: by drafter, promised and real seconds of its steps.
    """

    number: int
    load: StepLoad
    curves: CostCurves
    learned: LearnedCosts
    drafted: int = 0
    expected: float = 0.0
    is_shorter: bool = False
    catching_up: dict[str, float] = field(default_factory=dict)
    draft_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def promised(self, drafted: int, load: StepLoad | None = None) -> float:
        """Seconds of the target's step with so many draft tokens, by size."""
        step = load or self.load
        return self.curves.target.seconds(step.num_tokens + drafted, step.num_rows, step.kv_entries)

    def verify(self, most: int, load: StepLoad | None = None) -> list[float]:
        """Seconds of the target's step with 0, 1, … ``most`` draft tokens more than there are.

        Args:
            most: tokens.
            load: of another step than this round's, without draft tokens.
        """
        step, seconds = load or self.load, self.curves.target.seconds
        tokens, rows, entries = step.num_tokens, step.num_rows, step.kv_entries
        plain, ratio = seconds(tokens, rows, entries), self.learned.extra_ratio(rows)
        tokens += 0 if load else self.drafted
        return [plain + ratio * (seconds(tokens + more, rows, entries) - plain) for more in range(most + 1)]

    def plain_rate(self, load: StepLoad | None = None) -> float:
        """Tokens a second of each row without drafts."""
        return 1.0 / self.promised(0, load)


@dataclass
class Ask:
    """One sequence that may draft in a stage.

    Attributes:
        index: its place among the sequences of the step.
        seq: the sequence.
        memory: what is remembered of the drafter for it.
        most: draft tokens that it may have.
        gains: chance that its draft is accepted up to the first, second, … token; as many as ``most``.
        entry: seconds that its draft costs whatever its length.
        count: tokens that it is allowed.
        is_probe: these are a cheap test.
        is_out: it does without the drafter in this round.
    """

    index: int
    seq: "Sequence"
    memory: StageMemory
    most: int
    gains: list[float]
    entry: float = 0.0
    count: int = 0
    is_probe: bool = False
    is_out: bool = False


@dataclass
class Stage:
    """One drafter that sequences of a round wait for.

    Attributes:
        round: the round.
        name: of the drafter.
        drafter: what it is like, and costs.
        sequences: all that draft in this round.
        asks: those whose length is chosen.
        fixed: rows that draft anyway, by depth (0 is the first token).
    """

    round: Round
    name: str
    drafter: WeighedDrafter
    sequences: "Seq[Sequence]"
    asks: list[Ask]
    fixed: Seq[int] = ()

    @property
    def candidates(self) -> list[Ask]:
        """Who is not out."""
        return [ask for ask in self.asks if not ask.is_out]

    def draft_step(self, most: int, load: StepLoad | None = None, *, mended: bool = True) -> list[float]:
        """Seconds of one draft step with 0 (none at all), 1, … ``most`` rows.

        Args:
            most: rows.
            load: of another step than this round's.
            mended: by what was learned; else by size.
        """
        load, cost = load or self.round.load, self.drafter.cost
        if cost is None:
            return [0.0] * (most + 1)
        ratio = self.round.learned.draft_ratio(self.name, load.num_rows) if mended else 1.0
        past = load.kv_entries / load.num_rows
        return [0.0, *[ratio * cost.seconds(self.sequences, rows, past * rows) for rows in range(1, most + 1)]]

    def catch_up(self, ask: Ask, *, mended: bool = True) -> float:
        """Seconds for reading what the drafter has missed of a sequence; 0 if it has nothing to read with."""
        if self.drafter.cost is None or not self.drafter.traits.has_own_cache:
            return 0.0
        rows, learned = self.round.load.num_rows, self.round.learned
        ratio = learned.draft_ratio(reading_of(self.name), rows) if mended else 1.0
        return ratio * self.drafter.cost.catch_up_seconds(len(ask.seq.tokens) - ask.memory.read)

    @property
    def each_round(self) -> float:
        """Seconds that a draft of any length costs a sequence."""
        return 0.0 if self.drafter.cost is None else self.drafter.cost.round_seconds(self.round.load.num_rows)

    def price(self, ask: Ask) -> float:
        """Seconds that a draft costs whatever its length.

        Those of catching up are spread over the rounds that may profit from it.
        """
        catch_up = self.catch_up(ask)
        rounds = ask.seq.room_for_drafts / (1.0 + sum(ask.gains))
        return (catch_up and catch_up / min(max(rounds, 1.0), _HORIZON)) + self.each_round

    def rates(
        self, ask: Ask, load: StepLoad | None = None, gains: Seq[float] | None = None
    ) -> Iterator[tuple[float, float]]:
        """Tokens, and tokens a second, that a draft of one token promises, one of two and so on.

        As if all rows of the step did the same: the share of each is then what it costs.

        Args:
            ask: for whom.
            load: of another step than this round's.
            gains: as those of the sequence, which are taken where none are given.
        """
        step, gains = load or self.round.load, ask.gains if gains is None else gains
        rows = step.num_rows
        each = self.draft_step(rows, load)[rows]
        target = self.round.verify(rows * len(gains), load or step)
        seconds, expected = self.price(ask) * rows, 1.0
        for depth, gain in enumerate(gains, 1):
            seconds, expected = seconds + each, expected + gain
            yield expected, expected / (target[rows * depth] + seconds)
