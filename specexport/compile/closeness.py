"""How close a quantized engine is to the float model on a text: which token is best, and how much is lost.

A largest difference of a logit says little: one logit of a hundred thousand may be far off where nothing depends on it,
and a model whose every logit is a little wrong may be useless. What a text is made of are the best tokens and their
probabilities.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.quant_kinds import get_limits
from specexport_runtime.executors.base import Float32Array

DECIDED = float(np.log(2))
"""A position is decided where the float model's best token is twice as likely as the next: a near-tie says nothing."""

FEWEST_DECIDED = 20
"""Fewer decided positions (an untrained model has none) are judged by what is lost alone."""


class Closeness(NamedTuple):
    """A quantized engine against the float model, at some positions of a text.

    ``lost`` is the divergence over what the float model tells at these positions: the mean divergence of its own
    distributions from their average. 0 is no loss, 1 what the same guess at every position would lose. Unlike the
    divergence it means the same for a model that knows much and for an untrained one.
    """

    # share of the decided positions where both have the same best token; None if too few are decided
    agreement: float | None
    # mean Kullback-Leibler divergence from the float model's distributions, in nats; NaN if some logits are not finite
    divergence: float
    lost: float

    def obstacle(self, approximation: str) -> str | None:
        """Why an engine that is approximate so must be broken; None if it need not be."""
        limits = get_limits(approximation)
        least, most = limits.agreement, limits.lost
        if not self.lost <= most:  # a NaN must fail
            return (
                f"its distributions diverge by {self.divergence:.3g} nats, {self.lost:.3g} of what they tell (at most "
                f"{most:g} is allowed)"
            )
        if self.agreement is not None and self.agreement < least:
            return f"its best token is right at {self.agreement:.0%} of the positions (at least {least:.0%} is asked)"
        return None


def measure_closeness(found: Float32Array, reference: Float32Array) -> Closeness:
    """Compare the engine's logits [n, V] with the float model's at the same positions."""
    if not np.isfinite(found).all():
        return Closeness(None, float("nan"), float("nan"))
    everywhere, known = np.zeros(reference.shape[1]), 0.0  # sums of distributions, and of their negative entropies
    same, divergences = [], []
    for ours, theirs in zip(found, reference, strict=True):  # row by row: float64 copies of all of them would be large
        logs = log_softmax(theirs)
        likely = np.exp(logs)
        everywhere += likely
        known += float(likely @ logs)
        divergences.append(float(likely @ (logs - log_softmax(ours))))
        second, best = np.partition(theirs, -2)[-2:]
        if best - second > DECIDED:
            same.append(bool(ours.argmax() == theirs.argmax()))
    mean = everywhere / len(reference)
    told = known - float(everywhere @ np.log(np.maximum(mean, np.finfo(np.float64).tiny)))
    agreement = float(np.mean(same)) if len(same) >= FEWEST_DECIDED else None
    return Closeness(agreement, float(np.mean(divergences)), float(np.sum(divergences) / told))


def mean_divergence(found: Float32Array, reference: Float32Array) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the distributions that logits [R, V] stand for."""
    return float(np.mean([_divergence(*rows) for rows in zip(found, reference, strict=True)]))


def _divergence(found: Float32Array, reference: Float32Array) -> float:
    logs = log_softmax(reference)
    return float(np.exp(logs) @ (logs - log_softmax(found)))


def log_softmax(logits: Float32Array) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities that logits [V] stand for."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logs
