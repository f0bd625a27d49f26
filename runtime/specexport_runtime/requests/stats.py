"""What a generation did, in vLLM's metric definitions.

=======================  =====================================================================
``rounds``               target forward passes that gave this request tokens (prefill's last one too)
``drafted``              draft tokens that the target tested, those of branches included
``accepted``             draft tokens that were accepted and emitted, those of branches included
``branches``             of ``drafted``, tokens beside the chain of their draft
``accepted_branches``    of ``accepted``, tokens of branches
``acceptance_rate``      accepted / drafted
``mean_accepted_length`` 1 + accepted / rounds that had a draft: the mean tokens of a speculative round
``drafters``             rounds with a draft, drafted and accepted of each drafter; drafted and accepted add up to those
                         of the request, rounds to more where a grammar's forced tokens stand beside a drafter's own
=======================  =====================================================================
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexport_runtime.requests.layer_choice import LayerChoice
    from specexport_runtime.requests.records import Share

UNNAMED = "other"
"""What drafts of a drafter without a name are counted under."""
FEW_TOKENS, FEW_DRAFTS = 64, 16
"""So much must have been tested before it means something that nothing was accepted. Tokens after a refused one tell
nothing: where one draft in five has an accepted token, 16 drafts without any are an accident of 3 %."""


@dataclass
class DraftCounts:
    """What one drafter did."""

    rounds: int = 0  # of a request, with a draft of it
    drafted: int = 0  # draft tokens that the target tested
    accepted: int = 0  # of these, accepted and emitted
    branches: int = 0  # of ``drafted``, tokens beside the chain of their draft
    accepted_branches: int = 0  # of ``accepted``

    def add(self, drafted: int, accepted: int, branches: int = 0, accepted_branches: int = 0) -> None:
        """Count a draft."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.branches += branches
        self.accepted_branches += accepted_branches

    @property
    def never_accepted(self) -> bool:
        """Nothing was accepted, of :data:`FEW_TOKENS` tokens in :data:`FEW_DRAFTS` drafts at least."""
        return not self.accepted and self.drafted >= FEW_TOKENS and self.rounds >= FEW_DRAFTS

    def to_json(self) -> dict[str, int]:
        """JSON form."""
        return asdict(self)


def get_or_add_counts(counts: dict[str, DraftCounts], drafter: str) -> DraftCounts:
    """The counts of a drafter among those of others; new ones if it has none."""
    found = counts.get(drafter)
    if found is None:
        found = counts[drafter] = DraftCounts()
    return found


def sum_counts(parts: Iterable[DraftCounts]) -> DraftCounts:
    """Several counts together."""
    return DraftCounts(*map(sum, zip(*(vars(part).values() for part in parts), strict=True)))


def sum_by_drafter(parts: Iterable[dict[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """The counts of several requests together, by drafter."""
    found: dict[str, list[DraftCounts]] = {}
    for part in parts:
        for name, counts in part.items():
            found.setdefault(name, []).append(counts)
    return {name: sum_counts(each) for name, each in found.items()}


@dataclass
class RequestStats:
    """Counters of one request. Times are seconds on a monotonic clock."""

    rounds: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were not read again, for a cache row had them; None if none was looked at."""
    accepted_histogram: dict[int, int] = field(default_factory=dict)
    """Speculative rounds by number of accepted draft tokens."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Tokens that each round added, the target's own included."""
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    """What each drafter did, by its name in the draft plan."""
    unused: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of a drafter that ``auto`` did without: the most that it then promised, over plain decoding's tokens a second,
    and what its drafts had gained or lost, in rounds of plain decoding."""
    draft_exits: int = 0
    """Drafts that ended because the model was no longer sure."""
    layer_choice: "LayerChoice | None" = None
    """Layers of the draft out of the target itself."""
    preemptions: int = 0
    """How often it was paused, so that another did not wait for a row."""
    submit_time: float = 0.0
    start_time: float = 0.0
    first_token_time: float | None = None
    end_time: float | None = None

    def record_round(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        *,
        shares: "Sequence[Share]" = (),
        exited: bool = False,
    ) -> None:
        """Count a verify round that gave ``emitted`` tokens; ``shares`` are as in ``Proposal``."""
        self.rounds += 1
        self.num_generated_tokens += emitted
        self.accepted_lengths.append(emitted)
        if drafted:
            self.draft_rounds += 1
            self.draft_exits += exited
            self.drafted += drafted
            self.accepted += accepted
            for drafter, *counts in shares:
                get_or_add_counts(self.drafters, drafter or UNNAMED).add(*counts)
            self.accepted_histogram[accepted] = self.accepted_histogram.get(accepted, 0) + 1

    @property
    def branches(self) -> int:
        """Of the drafted tokens, those beside the chain of their draft."""
        return sum([counts.branches for counts in self.drafters.values()])

    @property
    def accepted_branches(self) -> int:
        """Of the accepted tokens, those of branches."""
        return sum([counts.accepted_branches for counts in self.drafters.values()])

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Mean tokens a speculative round, its correction or bonus token included; None if nothing was drafted."""
        return 1 + self.accepted / self.draft_rounds if self.draft_rounds else None

    @property
    def queued_s(self) -> float:
        """Seconds from submission to the start of prefill."""
        return max(self.start_time - self.submit_time, 0.0)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the end."""
        if self.end_time is None or self.first_token_time is None:
            return None
        return self.end_time - self.first_token_time

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's start (prefill) to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.start_time

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the wall time from start (prefill included) to end."""
        if self.end_time is None or self.end_time <= self.start_time:
            return None
        return self.num_generated_tokens / (self.end_time - self.start_time)

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {name: getattr(self, name) for name in _IN_JSON} | {
            "accepted_histogram": {str(count): n for count, n in sorted(self.accepted_histogram.items())},
            "accepted_lengths": list(self.accepted_lengths),
            "drafters": {name: counts.to_json() for name, counts in self.drafters.items()},
            "unused": {name: list(each) for name, each in self.unused.items()},
            "layer_choice": None if self.layer_choice is None else self.layer_choice.to_json(),
        }


_IN_JSON = (
    *("num_prompt_tokens", "num_generated_tokens", "cached_tokens", "rounds", "drafted", "accepted", "branches"),
    *("accepted_branches", "acceptance_rate", "mean_accepted_length", "accepted_histogram", "accepted_lengths"),
    *("drafters", "unused", "draft_exits", "layer_choice", "preemptions", "queued_s", "tokens_per_second"),
    *("time_to_first_token_s", "decode_s"),
)


@dataclass
class PhaseTimes:
    """Seconds a decoder spent, by phase."""

    prefill: float = 0.0  # steps that only fed prompts
    schedule: float = 0.0  # admission, cache rows, sharing out the token budget
    draft: float = 0.0  # draft engine and draft sampling
    draft_prefill: float = 0.0  # of it, inside the draft model's engine, in steps that only read prompts
    pack: float = 0.0  # the target's other steps outside the engine: filling their inputs
    verify: float = 0.0  # these steps inside the engine, prompt chunks of other requests included
    accept: float = 0.0  # logits processing, acceptance, commit
    engine: float = 0.0  # inside the engines of target and draft, in the rounds counted by ``rounds``
    total: float = 0.0  # those rounds as a whole; total - engine is the runtime's own time
    rounds: int = 0  # steps in which requests were verified
    moved: int = 0  # cache entries of accepted branches that were put in their place
    move: float = 0.0  # of ``accept``, for that
    draft_steps: int = 0  # steps of a draft engine: the longest draft of each round, without a grammar's tokens, summed

    def count_draft(self, seconds: float, prefill: float, tokens: Sequence[int]) -> None:
        """Count a round's drafting seconds and drafts; ``prefill`` are those of steps that only read prompts."""
        self.draft += seconds
        self.draft_prefill += prefill
        self.draft_steps += max(tokens, default=0)

    def count_move(self, moved: int, start: float) -> None:
        """Count cache entries that were moved, which began at ``start``."""
        self.moved += moved
        self.move += time.perf_counter() - start

    def count_step(self, start: float, executed: float, engine: float, *, is_round: bool) -> None:
        """Count a step of the target, packed from ``start``, done at ``executed``, with ``engine`` seconds inside."""
        now = time.perf_counter()
        if not is_round:
            self.prefill += now - start
            return
        self.pack += executed - start - engine
        self.verify += engine
        self.accept += now - executed


@dataclass
class PaddingStats:
    """What the padded method pays for, counted in every mode (EMS-SD, Ni et al. 2025).

    In a verify round of several requests each advances by its own accepted length (draft tokens accepted, and the
    target's own token). The padded method advances all by the longest of them.
    """

    accepted: int = 0  # sum of the accepted lengths
    padding: int = 0  # sum of what each falls short of the longest in its round
    input_tokens: int = 0  # fed in these rounds, prompt chunks included
    input_padding: int = 0  # padding tokens fed beside them (0 with unpadded input)

    def record_round(self, lengths: Sequence[int]) -> None:
        """Count one round by the accepted lengths of its requests."""
        self.accepted += sum(lengths)
        self.padding += max(lengths) * len(lengths) - sum(lengths)

    @property
    def ratio(self) -> float:
        """The padding ratio: average padding length over average accepted length; 0 before the first round."""
        return self.padding / self.accepted if self.accepted else 0.0
