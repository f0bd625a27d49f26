"""The acceptance model of one speculative round: exact expectations, and the round simulated token by token.

A sequence finds a draft of n tokens with probability h, and each of them is right with probability a, independently. It
advances by its leading right tokens and one of the target's: A. docs/ems-sd.md has the formulas and their sources.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specexport_runtime.errors import UserInputError

MAX_DRAFT_TOKENS = 1 << 21  # of a round, all sequences together: 16 MB of random numbers
Floats = NDArray[np.float64]
Seed = int | tuple[int, ...]


def check(valid: bool, wrong: str, fix: str = "give a whole number from 1 up.") -> None:
    """Refuse an argument that is not valid with UserInputError."""
    if not valid:
        raise UserInputError(wrong, fix)


def _check_batch(batch_size: int, draft_length: int) -> None:
    check(batch_size >= 1, f"The batch size is {batch_size}.")
    fix = f"stay below {MAX_DRAFT_TOKENS} draft tokens a round."
    many = f"{batch_size} drafts of {draft_length} tokens are too many."
    check(batch_size * draft_length <= MAX_DRAFT_TOKENS, many, fix)


class Padding(NamedTuple):
    """Expectations of one round of a batch, in tokens a sequence."""

    accepted: float  # E[A], the mean over the sequences: tokens a round, the target's own included
    longest: float  # E[max A], what a padded batch advances by
    padding: float  # ``longest - accepted``, the slots without a token

    @property
    def ratio(self) -> float:
        """The padding ratio."""
        return self.padding / self.accepted


class StepPrice(NamedTuple):
    """Prices: a target step over T tokens costs ``1 + token_cost * T``, and reading a cache nothing."""

    cost_ratio: float = 0.0  # c, a draft step over a plain target step of the same batch; K are paid a round
    token_cost: float = 0.0  # one more token in a target step over the step's fixed cost; 0: verify is free


class Speedup(NamedTuple):
    """Expected speedups over plain decoding of the same batch."""

    unpadded: float  # only real tokens are in the target's input
    padded: float  # every sequence's input has the longest draft's length


def survival(
    accuracy: ArrayLike, draft_length: int, *, hit_rate: float = 1.0, concentration: float | None = None
) -> Floats:
    """P(A > k) for k = 1..n: float64 [n] for one accuracy, [b, n] for accuracies of shape [b].

    With a concentration C, E[a^k] = prod_{i<k} (a C + i) / (C + i). UserInputError out of range, here and below.
    """
    mean = np.asarray(accuracy, dtype=np.float64)
    for name, value in [*(("An accuracy", each) for each in np.unique(mean)), ("The hit rate", hit_rate)]:
        check(0.0 <= value <= 1.0, f"{name} is {value:g}, which is not a probability.", "give a number from 0 to 1.")
    check(draft_length >= 1, f"The draft length is {draft_length}.")
    spread = concentration is None or 0.0 < concentration < math.inf
    check(spread, f"The concentration is {concentration}.", "give a finite number above 0, or none.")
    steps, factors = np.arange(draft_length, dtype=np.float64), mean[..., None]
    if concentration is not None:
        factors = (factors * concentration + steps) / (concentration + steps)
    return hit_rate * np.cumprod(np.broadcast_to(factors, (*mean.shape, draft_length)), axis=-1, dtype=np.float64)


def mixed_padding(accuracies: list[float], draft_length: int, **model: Any) -> Padding:
    """Padding of one round of a batch of sequences of these accuracies; ``model`` as :func:`survival`.

    With s_jk = P(A_j > k):  E[A_j] = 1 + sum_k s_jk  and  E[max A] = 1 + sum_k (1 - prod_j (1 - s_jk)).
    """
    check(len(accuracies) >= 1, "The batch size is 0.")
    chances = survival(accuracies, draft_length, **model)
    accepted = 1.0 + float(chances.sum(axis=1).mean())
    if len(accuracies) == 1:
        return Padding(accepted, accepted, 0.0)
    with np.errstate(divide="ignore"):  # log 0 at certain acceptance: the product is 0, as it should be
        none_reaches = np.log1p(-chances).sum(axis=0)
    longest = 1.0 + float(-np.expm1(none_reaches).sum())
    return Padding(accepted, longest, max(longest - accepted, 0.0))  # rounding may go below zero


def batch_padding(accuracy: float, batch_size: int, draft_length: int, **model: Any) -> Padding:
    """:func:`mixed_padding` of sequences of one accuracy."""
    _check_batch(batch_size, draft_length)
    return mixed_padding([accuracy] * batch_size, draft_length, **model)


def expected_speedup(
    accuracy: float, draft_length: int, cost: StepPrice, *, batch_size: int = 1, hit_rate: float = 1.0, **model: Any
) -> Speedup:
    """Expected speedups: E[A] over the cost of a round; ``model`` as :func:`survival`."""
    check(batch_size >= 1, f"The batch size is {batch_size}.")
    for name, value in (("cost ratio", cost.cost_ratio), ("token cost", cost.token_cost)):
        check(0.0 <= value < math.inf, f"The {name} is {value:g}.", "give a finite number from 0 up.")
    accepted = 1.0 + float(survival(accuracy, draft_length, hit_rate=hit_rate, **model).sum())
    any_hit = 1.0 - (1.0 - hit_rate) ** batch_size
    tokens = [batch_size * (1.0 + share * draft_length) for share in (hit_rate, any_hit)]  # of the target's input
    verify = [(1.0 + cost.token_cost * fed) / (1.0 + cost.token_cost * batch_size) for fed in tokens]
    return Speedup(*(accepted / (draft_length * cost.cost_ratio + step) for step in verify))


def best_draft_length(accuracy: float, cost: StepPrice, *, max_draft_length: int, **model: Any) -> int:
    """The K of 1..max_draft_length with the highest unpadded speedup; 0 if none is faster than plain decoding."""
    check(max_draft_length >= 1, f"The largest draft length is {max_draft_length}.")
    lengths = range(1, max_draft_length + 1)
    speedups = {0: 1.0} | {length: expected_speedup(accuracy, length, cost, **model).unpadded for length in lengths}
    return max(speedups, key=speedups.__getitem__)


class Estimate(NamedTuple):
    """A mean over samples."""

    mean: float
    standard_error: float | None  # None with a single sample

    def deviations(self, expected: float) -> float | None:
        """How many standard errors the estimate is from ``expected``; None if the error is unknown or zero."""
        return (self.mean - expected) / self.standard_error if self.standard_error else None


class Drafts(NamedTuple):
    """What is drafted for a batch; the arguments of :func:`survival`."""

    accuracy: float
    draft_length: int
    hit_rate: float = 1.0
    concentration: float | None = None

    def draw_accuracies(self, batch_size: int, samples: int, rng: np.random.Generator) -> Iterator[Floats]:
        """One accuracy for each sequence, [samples, b] in parts whose drafts fit in memory."""
        survival(*self[:2], hit_rate=self.hit_rate, concentration=self.concentration)  # checks
        _check_batch(batch_size, self.draft_length)
        check(samples >= 1, f"The number of samples is {samples}.")
        size = MAX_DRAFT_TOKENS // (batch_size * self.draft_length)
        for start in range(0, samples, size):
            shape = (min(size, samples - start), batch_size)
            if self.concentration is None or self.accuracy in {0.0, 1.0}:
                yield np.full(shape, self.accuracy)
            else:
                yield rng.beta(self.accuracy * self.concentration, (1 - self.accuracy) * self.concentration, shape)

    def draw_advances(self, rng: np.random.Generator, accuracies: Floats) -> NDArray[np.int64]:
        """A of one round, from 1 to n + 1, in the shape of ``accuracies``."""
        right = rng.random((*accuracies.shape, self.draft_length)) < accuracies[..., None]
        leading: NDArray[np.int64] = np.logical_and.accumulate(right, axis=-1).sum(axis=-1)
        if self.hit_rate < 1.0:
            leading = leading * (rng.random(accuracies.shape) < self.hit_rate)
        return leading + 1


def _mean(values: Floats) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(float(values.mean()), error)


def _ratio(part: Floats, whole: Floats) -> Estimate:
    """sum(part) / sum(whole), its standard error by linearisation (delta method)."""
    ratio = float(part.sum() / whole.sum())
    error = _mean(part - ratio * whole).standard_error
    return Estimate(ratio, None if error is None else error / float(whole.mean()))


def simulate_rounds(drafts: Drafts, batch_size: int, *, samples: int, seed: Seed) -> dict[str, Estimate]:
    """Independent rounds of a batch: what :class:`Padding` has, and the ratio. Equal seeds give equal results."""
    rng = np.random.default_rng(seed)
    advances = (drafts.draw_advances(rng, each) for each in drafts.draw_accuracies(batch_size, samples, rng))
    means = [(each.mean(axis=1), each.max(axis=1).astype(np.float64)) for each in advances]
    mean, most = np.concatenate(means, axis=1)
    found = {"accepted": _mean(mean), "longest": _mean(most), "padding": _mean(most - mean)}
    return found | {"ratio": _ratio(most - mean, mean)}


def simulate_generations(
    drafts: Drafts, batch_size: int, *, max_new_tokens: int, prompt_tokens: int = 0, samples: int, seed: Seed
) -> dict[str, Estimate]:
    """Rounds, padding, idle share, and cache slots over unpadded ones, of a static batch to its last end."""
    check(max_new_tokens >= 1, f"The number of new tokens is {max_new_tokens}.")
    rng = np.random.default_rng(seed)
    accuracies = drafts.draw_accuracies(batch_size, samples, rng)
    parts = [simulate_batches(drafts, each, max_new_tokens, prompt_tokens, rng) for each in accuracies]
    rounds, row_rounds, padding, padded_reads, own_reads = np.concatenate(parts, axis=1)
    return {
        "rounds": _mean(rounds),
        "ratio": _ratio(padding, np.full_like(padding, batch_size * max_new_tokens)),
        "idle": _ratio(batch_size * rounds - row_rounds, batch_size * rounds),
        "cache_slots": _ratio(padded_reads, own_reads),
    }


def simulate_batches(drafts: Drafts, accuracies: Floats, tokens: int, prompt: int, rng: np.random.Generator) -> Floats:
    """Rounds, row-rounds, padding slots, slots read in a padded and in an unpadded cache: float64 [5, samples]."""
    left = np.full(accuracies.shape, tokens)
    padded_length = np.full(len(accuracies), prompt)
    totals = np.zeros((5, len(accuracies)))
    while (running := left > 0).any():
        advances = np.where(running, np.minimum(drafts.draw_advances(rng, accuracies), left), 0)
        longest, rows = advances.max(axis=1), running.sum(axis=1)
        own_length = prompt + tokens - left
        step = drafts.draft_length + 1  # the tokens of the step itself are read too
        padding = ((longest[:, None] - advances) * running).sum(axis=1)
        totals += [rows > 0, rows, padding, (padded_length + step) * rows, ((own_length + step) * running).sum(axis=1)]
        left -= advances
        padded_length += longest
    return totals
