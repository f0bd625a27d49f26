"""Throughput and waiting, from the costs of steps: the model that ``scaling.py`` checks."""

from dataclasses import dataclass
from itertools import accumulate

from specexport_runtime.abi import kv_slack
from specexport_runtime.bundle.manifest import Manifest
from specexport_runtime.costs.curves import CostCurves


def tokens_a_round(acceptance: float, k: int) -> float:
    """Expected tokens of a sequence in a round with K draft tokens, each accepted if those before it were."""
    return sum(acceptance**i for i in range(k + 1))


@dataclass(frozen=True)
class Throughput:
    """Predicts tokens per second of one engine whose rows are all busy.

    Attributes:
        curves: what steps cost.
        acceptance: probability that a draft token is accepted, given that those before it were.
        host_fixed: seconds of a round outside the engines.
        host_token: seconds more of it for each token of the target's step.
        prompt_tokens: mean tokens of a prompt.
        max_tokens: mean tokens that are generated.
    """

    curves: CostCurves
    acceptance: float
    host_fixed: float
    host_token: float
    prompt_tokens: float
    max_tokens: float

    def round_seconds(self, rows: int, k: int) -> float:
        """Seconds of a round: K draft steps, one step of the target over ``rows * (K + 1)`` tokens, and the host."""
        entries = rows * (self.prompt_tokens + self.max_tokens / 2)
        tokens = rows * (k + 1)
        seconds = self.curves.target.seconds(tokens, rows, entries) + self.host_fixed + self.host_token * tokens
        if k:
            draft = self.curves.drafters["draft-model"]
            backlog = rows * (1 + self.acceptance**k)  # a draft that was accepted whole left a token unread
            seconds += draft.seconds(round(backlog), rows, entries)
            seconds += (k - 1) * draft.seconds(rows, rows, entries)
        return seconds

    def request_seconds(self, rows: int, k: int) -> float:
        """Seconds of one request while ``rows`` are busy: its rounds, and the prompts of as many others in between."""
        rounds = self.max_tokens / tokens_a_round(self.acceptance, k)
        prompt = self.curves.target.seconds(round(self.prompt_tokens), 1, self.prompt_tokens / 2)
        return rounds * self.round_seconds(rows, k) + rows * prompt

    def tokens_per_second(self, rows: int, k: int) -> float:
        """Generated tokens per second of all rows together."""
        return rows * self.max_tokens / self.request_seconds(rows, k)


@dataclass(frozen=True)
class Queue:
    """A queue in front of rows: Poisson arrivals, exponential work, a speed that depends on how many rows are busy.

    Attributes:
        rates: requests per second that are finished with 1, 2, … all rows busy.
    """

    rates: tuple[float, ...]

    def lengths(self, arrivals: float) -> tuple[float, float]:
        """Mean number of requests that are there, and of those that wait.

        The chain of a queue with c rows: ``p(n) = p(n - 1) * arrivals / rate(min(n, c))``; beyond c it is geometric.

        Args:
            arrivals: requests per second, fewer than all rows together finish.
        """
        load = arrivals / self.rates[-1]
        if not 0 < load < 1:
            raise ValueError(f"{arrivals} requests per second for rows that finish {self.rates[-1]}: the queue grows.")
        weights = list(accumulate((arrivals / rate for rate in self.rates), lambda a, b: a * b, initial=1.0))
        full = weights[-1]
        total = sum(weights) + full * load / (1 - load)
        waiting = full * load / (1 - load) ** 2
        busy = sum(n * weight for n, weight in enumerate(weights)) + len(self.rates) * full * load / (1 - load)
        return (busy + waiting) / total, waiting / total

    def seconds(self, arrivals: float) -> tuple[float, float]:
        """Mean seconds from arrival to the end, and of waiting for a row (Little's law)."""
        there, waiting = self.lengths(arrivals)
        return there / arrivals, waiting / arrivals


def row_bytes(manifest: Manifest, max_model_len: int) -> int:
    """Bytes of one cache row of all models: keys and values of every layer, for the longest sequence."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}
    entries = max_model_len + kv_slack(manifest.lookahead)
    return sum(
        size[model.dtype]
        * entries
        * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in model.attention.layers)
        for model in manifest.models.values()
    )
