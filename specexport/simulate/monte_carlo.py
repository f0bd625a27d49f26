"""The acceptance model simulated token by token: a check of the closed form, and whole generations, which have none."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specexport.simulate.checks import (
    MAX_DRAFT_TOKENS,
    check_batch,
    check_concentration,
    check_count,
    check_probability,
)
from specexport.simulate.closed_form import Floats

Counts = NDArray[np.int64]
Seed = int | tuple[int, ...]


class Estimate(NamedTuple):
    """A mean over samples."""

    mean: float
    standard_error: float | None  # None with a single sample

    def deviations(self, expected: float) -> float | None:
        """How many standard errors the estimate is from ``expected``; None if the error is unknown or zero."""
        return (self.mean - expected) / self.standard_error if self.standard_error else None


class RoundEstimate(NamedTuple):
    """Simulated rounds of a batch; the fields of :class:`~specexport.simulate.closed_form.Padding`."""

    accepted: Estimate
    longest: Estimate
    padding: Estimate
    ratio: Estimate


class GenerationEstimate(NamedTuple):
    """Simulated generations of a static batch: no sequence joins, and the batch ends with its last sequence."""

    rounds: Estimate  # verify rounds until the last sequence has all its tokens
    # padding slots over accepted tokens, summed over the generation; finished sequences count in neither
    ratio: Estimate
    idle: Estimate  # share of row-rounds spent by sequences that were finished already
    # cache slots that attention reads in a padded cache over those in an unpadded one, unfinished sequences only
    cache_slots: Estimate


class Drafts(NamedTuple):
    """What is drafted for a batch; see :mod:`specexport.simulate.closed_form` for the model."""

    accuracy: float  # a, or its mean if ``concentration`` is given
    draft_length: int  # n
    hit_rate: float = 1.0  # h
    concentration: float | None = None  # C of the Beta distribution that each sequence draws its accuracy from

    def check(self) -> None:
        """Refuse a field out of its range with UserInputError."""
        check_probability("The accuracy", self.accuracy)
        check_count("The draft length", self.draft_length)
        check_probability("The hit rate", self.hit_rate)
        check_concentration(self.concentration)

    def draw_accuracies(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """One accuracy for each sequence."""
        if self.concentration is None or self.accuracy in {0.0, 1.0}:
            return np.full(shape, self.accuracy)
        return rng.beta(self.accuracy * self.concentration, (1 - self.accuracy) * self.concentration, shape)

    def draw_advances(self, rng: np.random.Generator, accuracies: Floats) -> Counts:
        """A of one round, int64 from 1 to n + 1, in the shape of ``accuracies``.

        That is a sequence's leading right draft tokens, and one token from the target.
        """
        right = rng.random((*accuracies.shape, self.draft_length)) < accuracies[..., None]
        leading: Counts = np.logical_and.accumulate(right, axis=-1).sum(axis=-1)
        if self.hit_rate < 1.0:
            leading = leading * (rng.random(accuracies.shape) < self.hit_rate)
        return leading + 1


def _chunks(samples: int, draws_per_sample: int) -> Iterator[int]:
    size = MAX_DRAFT_TOKENS // draws_per_sample
    yield from (min(size, samples - start) for start in range(0, samples, size))


def _mean(values: Floats) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(float(values.mean()), error)


def _ratio(part: Floats, whole: Floats) -> Estimate:
    """sum(part) / sum(whole), its standard error by linearisation (delta method)."""
    ratio = float(part.sum() / whole.sum())
    error = _mean(part - ratio * whole).standard_error
    return Estimate(ratio, None if error is None else error / float(whole.mean()))


def simulate_rounds(drafts: Drafts, batch_size: int, *, samples: int, seed: Seed) -> RoundEstimate:
    """Simulate ``samples`` independent rounds of a batch; equal seeds give equal results.

    An argument out of its range raises UserInputError.
    """
    drafts.check()
    check_batch(batch_size, drafts.draft_length)
    check_count("The number of samples", samples)
    rng = np.random.default_rng(seed)
    accepted, longest = [], []
    for size in _chunks(samples, batch_size * drafts.draft_length):
        advances = drafts.draw_advances(rng, drafts.draw_accuracies(rng, (size, batch_size)))
        accepted.append(advances.mean(axis=1))
        longest.append(advances.max(axis=1).astype(np.float64))
    mean, most = np.concatenate(accepted), np.concatenate(longest)
    return RoundEstimate(_mean(mean), _mean(most), _mean(most - mean), _ratio(most - mean, mean))


def simulate_generations(
    drafts: Drafts, batch_size: int, *, max_new_tokens: int, prompt_tokens: int = 0, samples: int, seed: Seed
) -> GenerationEstimate:
    """Simulate ``samples`` generations of a static batch; each sequence keeps its accuracy throughout.

    Every sequence starts with ``prompt_tokens`` in its cache and generates ``max_new_tokens``. Equal seeds give equal
    results. An argument out of its range raises UserInputError.
    """
    drafts.check()
    check_batch(batch_size, drafts.draft_length)
    check_count("The number of new tokens", max_new_tokens)
    check_count("The number of samples", samples)
    rng = np.random.default_rng(seed)
    parts = [
        _generate(drafts, drafts.draw_accuracies(rng, (size, batch_size)), max_new_tokens, prompt_tokens, rng)
        for size in _chunks(samples, batch_size * drafts.draft_length)
    ]
    rounds, row_rounds, padding, padded_reads, own_reads = np.concatenate(parts, axis=1)
    return GenerationEstimate(
        rounds=_mean(rounds),
        ratio=_ratio(padding, np.full_like(padding, batch_size * max_new_tokens)),
        idle=_ratio(batch_size * rounds - row_rounds, batch_size * rounds),
        cache_slots=_ratio(padded_reads, own_reads),
    )


def _generate(
    drafts: Drafts, accuracies: Floats, max_new_tokens: int, prompt_tokens: int, rng: np.random.Generator
) -> Floats:
    """Generations of a batch, all samples at once; accuracies are float64 [samples, b].

    The result is float64 [5, samples]: rounds, row-rounds, padding slots, slots read in a padded and in an unpadded
    cache.
    """
    left = np.full(accuracies.shape, max_new_tokens)
    padded_length = np.full(len(accuracies), prompt_tokens)
    totals = np.zeros((5, len(accuracies)))
    while (running := left > 0).any():
        advances = np.where(running, np.minimum(drafts.draw_advances(rng, accuracies), left), 0)
        longest = advances.max(axis=1)
        own_length = prompt_tokens + max_new_tokens - left
        step = drafts.draft_length + 1  # the tokens of the step itself are read too
        totals[0] += running.any(axis=1)
        totals[1] += running.sum(axis=1)
        totals[2] += ((longest[:, None] - advances) * running).sum(axis=1)
        totals[3] += (padded_length + step) * running.sum(axis=1)
        totals[4] += ((own_length + step) * running).sum(axis=1)
        left -= advances
        padded_length += longest
    return totals
