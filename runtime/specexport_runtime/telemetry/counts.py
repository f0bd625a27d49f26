"""What a server's metrics count, by vLLM's definitions where it has one; ``metrics`` gives them to Prometheus.

A scrape sees all numbers of the same moment: accepted tokens never outnumber drafted ones.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specexport_runtime.requests.stats import UNNAMED, DraftCounts, get_or_add_counts, sum_counts

if TYPE_CHECKING:
    from specexport_runtime.requests.request import FinishReason, Request
    from specexport_runtime.telemetry.observers import RoundRecord

# vLLM's bounds, and finer ones below for small models on CPUs: a quantile is no finer than the bounds around it.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

REASONS: "dict[FinishReason | None, str]" = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""How a request ended, in vLLM's words."""


def length_bounds(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to ``longest``."""
    bounds = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= longest)


class Histogram:
    """Counts of values by bounds, each the largest value that its bucket takes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += times * value


def _histograms() -> dict[str, Histogram]:
    seconds = ("e2e", "queue", "prefill", "decode", "inference")
    return {
        "step_tokens": Histogram(STEP_TOKENS),
        "first_token": Histogram(FIRST_TOKEN_SECONDS),
        "between_tokens": Histogram(TOKEN_SECONDS),
        "per_token": Histogram(TOKEN_SECONDS),
        **{name: Histogram(REQUEST_SECONDS) for name in seconds},
        **{name: Histogram(()) for name in ("prompt_tokens", "generation_tokens", "max_tokens")},
    }


@dataclass
class EngineCounts:
    """All that was counted since an engine was loaded. Not locked: that is the caller's part."""

    steps: int = 0
    step_seconds: float = 0.0  # of all steps, drafting included
    prompt_tokens: int = 0  # that were fed, each counted once
    reread_tokens: int = 0  # of paused requests, that were fed again
    preemptions: int = 0  # how often a request was paused
    prefix_queries: int = 0  # prompt tokens of ended requests for which cache rows were searched
    prefix_hits: int = 0  # of these, tokens that a row had
    generation_tokens: int = 0
    # Seconds of rounds with drafts that were faster than plain decoding, by drafter, and of rounds that were slower. A
    # round's are shared out among its drafters by their tokens tested: a step has one time, whatever drafted in it.
    saved: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=lambda: [0])  # drafts by number of accepted tokens
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS.values(), 0))  # by reason
    failures: dict[str, int] = field(default_factory=dict)  # of those with reason ``error``, by class of the exception
    refused: dict[str, int] = field(default_factory=dict)  # requests that never reached the engine, by reason
    histograms: dict[str, Histogram] = field(default_factory=_histograms)
    last_token: dict[int, float] = field(default_factory=dict)  # when each running request got its newest, by ``id``

    @property
    def saved_seconds(self) -> float:
        """Seconds that all drafters saved together, in rounds that were faster than plain decoding."""
        return sum(self.saved.values())

    @property
    def lost_seconds(self) -> float:
        """Seconds that all drafters lost together, in rounds that were slower."""
        return sum(self.lost.values())

    @property
    def all_drafts(self) -> DraftCounts:
        """What all drafters did."""
        return sum_counts(self.drafters.values())

    @property
    def accepted_at(self) -> dict[str, int]:
        """Accepted draft tokens by their position in the draft: of a branch, the tokens in front of it."""
        return {str(i): sum(self.accepted[i + 1 :]) for i in range(len(self.accepted) - 1)}

    def set_limits(self, longest: int, lookahead: int) -> None:
        """Fit to an engine: the longest request that it takes, and the longest draft."""
        for name in ("prompt_tokens", "generation_tokens", "max_tokens"):
            self.histograms[name] = Histogram(length_bounds(longest))
        self.accepted += [0] * (lookahead + 1 - len(self.accepted))

    def add_round(self, record: "RoundRecord", now: float) -> None:
        """Count a step that ended at ``now``."""
        generated = 0
        tested: dict[str, int] = {}  # draft tokens, by drafter
        waits: dict[float, int] = {}  # requests by when they last got tokens: most rounds, all at the same time
        for event in record.events:
            if not event.tokens:
                continue
            request, key = event.request, id(event.request)
            generated += len(event.tokens)
            if event.drafted:
                self._add_accepted(event.accepted)
                for drafter, *counts in event.proposal.shares(event.accepted, event.on_chain):
                    name = drafter or UNNAMED
                    tested[name] = tested.get(name, 0) + counts[0]
                    get_or_add_counts(self.drafters, name).add(*counts)
            stats = request.stats
            if stats.rounds == 1:
                self.histograms["first_token"].observe((stats.first_token_time or now) - stats.submit_time)
            elif (last := self.last_token.get(key)) is not None:
                waits[last] = waits.get(last, 0) + 1
            self.last_token[key] = now
        for last, times in waits.items():
            self.histograms["between_tokens"].observe(now - last, times)
        self.steps += 1
        self.step_seconds += record.seconds
        self.prompt_tokens += record.prompt_tokens - record.reread_tokens
        self.reread_tokens += record.reread_tokens
        self.preemptions += record.preemptions
        self.generation_tokens += generated
        self.histograms["step_tokens"].observe(record.prompt_tokens + generated)
        # A round without drafts saves nothing; what it differs by from the mean of its like is chance.
        if tested and (saved := record.saved_seconds):
            seconds = self.saved if saved > 0 else self.lost
            each = abs(saved) / sum(tested.values())
            for name, tokens in tested.items():
                seconds[name] = seconds.get(name, 0.0) + each * tokens

    def _add_accepted(self, accepted: int) -> None:
        if accepted >= len(self.accepted):  # longer than the engine said
            self.accepted += [0] * (accepted + 1 - len(self.accepted))
        self.accepted[accepted] += 1

    def add_end(self, request: "Request") -> None:
        """Count the end of a request; its times and lengths only if it was not cancelled and did not fail."""
        reason = REASONS.get(request.finish_reason, "error")
        self.last_token.pop(id(request), None)
        self.finished[reason] += 1
        if reason == "error":
            name = type(request.error).__name__
            self.failures[name] = self.failures.get(name, 0) + 1
        stats, seen = request.stats, self.histograms
        if stats.cached_tokens is not None:
            self.prefix_queries += stats.num_prompt_tokens
            self.prefix_hits += stats.cached_tokens
        if reason not in ("stop", "length") or stats.end_time is None or stats.first_token_time is None:
            return
        decode = stats.end_time - stats.first_token_time
        seen["e2e"].observe(stats.end_time - stats.submit_time)
        seen["queue"].observe(stats.start_time - stats.submit_time)
        seen["prefill"].observe(stats.first_token_time - stats.start_time)
        seen["decode"].observe(decode)
        seen["inference"].observe(stats.end_time - stats.start_time)
        # The first token belongs to the prefill; a text of one token took no time a token, as in vLLM.
        seen["per_token"].observe(decode / max(stats.num_generated_tokens - 1, 1))
        seen["prompt_tokens"].observe(stats.num_prompt_tokens)
        seen["generation_tokens"].observe(stats.num_generated_tokens)
        seen["max_tokens"].observe(request.params.max_tokens)
