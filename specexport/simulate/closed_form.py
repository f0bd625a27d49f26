"""Exact expectations of one speculative round under the independent-acceptance model.

A draft of n tokens is proposed to each of b sequences. A sequence finds a draft with probability h (1 for a draft
model; lookup may find nothing), and each draft token is right with probability a, independently. X is the number of
leading right tokens, at most n, so

    P(X >= k) = h a^k    for k = 1..n

and the round advances the sequence by A = X + 1 tokens: the target adds one token. A padded batch advances every
sequence by the longest A, so a sequence gets E[max A] - E[A] padding slots. Where the formulas come from:

- E[A] = (1 - a^(n+1)) / (1 - a) and the speedup E[A] / (K c + 1): Leviathan et al. 2023, equation 1 and theorem 3.8.
- The longest acceptance of a padded batch as the cause of padding: EMS-SD (Ni et al., NAACL 2025). The closed forms of
  its expectation, hit rate, unequal and random accuracies and the token cost are derived here.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specexport.simulate.checks import (
    check_batch,
    check_concentration,
    check_count,
    check_not_negative,
    check_probability,
)

Floats = NDArray[np.float64]


class Padding(NamedTuple):
    """Expectations of one round of a batch, in tokens a sequence."""

    accepted: float  # E[A], the mean over the sequences: tokens a round, the target's own included
    longest: float  # E[max A], what a padded batch advances by
    padding: float  # ``longest - accepted``, the slots without a token

    @property
    def ratio(self) -> float:
        """The padding ratio: average padding length over average accepted length."""
        return self.padding / self.accepted


class StepCost(NamedTuple):
    """What a round costs, in units of the fixed part of a target step.

    A target step over T tokens costs ``1 + token_cost * T``, so a plain step of b sequences costs
    ``1 + token_cost * b``. Reading a longer KV cache is free in this model.
    """

    # c, a draft step over a plain target step of the same batch; 0 for lookup; K are paid a round
    cost_ratio: float = 0.0
    token_cost: float = 0.0  # one more token in a target step over the step's fixed cost; 0: verify is free

    def round_cost(self, draft_length: int, batch_size: int, tokens: float) -> float:
        """Cost of a round over a plain step of the same batch: K draft steps, a target step over ``tokens`` tokens."""
        verify = (1.0 + self.token_cost * tokens) / (1.0 + self.token_cost * batch_size)
        return draft_length * self.cost_ratio + verify


class Speedup(NamedTuple):
    """Expected speedups over plain decoding of the same batch."""

    unpadded: float  # only real tokens are in the target's input
    padded: float  # every sequence's input has the longest draft's length


def survival(
    accuracy: ArrayLike, draft_length: int, *, hit_rate: float = 1.0, concentration: float | None = None
) -> Floats:
    """P(X >= k) for k = 1..n: float64 [n] for one accuracy, [b, n] for accuracies of shape [b].

    With a concentration C each sequence draws its accuracy from Beta(a C, (1 - a) C); a is the mean, and
    E[a^k] = prod_{i<k} (a C + i) / (C + i). An argument out of its range raises UserInputError.
    """
    mean = np.asarray(accuracy, dtype=np.float64)
    for value in mean.ravel():
        check_probability("An accuracy", float(value))
    check_count("The draft length", draft_length)
    check_probability("The hit rate", hit_rate)
    check_concentration(concentration)
    steps = np.arange(draft_length, dtype=np.float64)
    if concentration is None:
        factors = np.broadcast_to(mean[..., None], (*mean.shape, draft_length))
    else:
        factors = (mean[..., None] * concentration + steps) / (concentration + steps)
    return hit_rate * np.cumprod(factors, axis=-1, dtype=np.float64)


def expected_padding(chances: Floats) -> Padding:
    """Padding of one round of a batch, from the s of :func:`survival`, [b, n]; its rows may differ.

    With s_jk = P(X_j >= k):  E[A_j] = 1 + sum_k s_jk  and  E[max A] = 1 + sum_k (1 - prod_j (1 - s_jk)), which for
    equal accuracies is 1 + sum_{k=1..n} (1 - (1 - a^k)^b). Raises UserInputError if there is no sequence.
    """
    check_count("The batch size", len(chances))
    accepted = 1.0 + float(chances.sum(axis=1).mean())
    if len(chances) == 1:
        return Padding(accepted, accepted, 0.0)
    with np.errstate(divide="ignore"):  # log 0 at certain acceptance: the product is 0, as it should be
        none_reaches = np.log1p(-chances).sum(axis=0)
    longest = 1.0 + float(-np.expm1(none_reaches).sum())
    return Padding(accepted, longest, max(longest - accepted, 0.0))  # rounding may go below zero


def batch_padding(
    accuracy: float,
    batch_size: int,
    draft_length: int,
    *,
    hit_rate: float = 1.0,
    concentration: float | None = None,
) -> Padding:
    """:func:`expected_padding` of ``batch_size`` sequences of one accuracy.

    An argument out of its range raises UserInputError.
    """
    check_batch(batch_size, draft_length)
    one = survival(accuracy, draft_length, hit_rate=hit_rate, concentration=concentration)
    return expected_padding(np.tile(one, (batch_size, 1)))


def mixed_padding(accuracies: Seq[float], draft_length: int, *, hit_rate: float = 1.0) -> Padding:
    """:func:`expected_padding` of a batch whose sequences have the accuracies given.

    An argument out of its range, or no accuracy, raises UserInputError.
    """
    check_count("The batch size", len(accuracies))
    return expected_padding(survival(accuracies, draft_length, hit_rate=hit_rate))


def expected_speedup(
    accuracy: float,
    draft_length: int,
    cost: StepCost,
    *,
    batch_size: int = 1,
    hit_rate: float = 1.0,
    concentration: float | None = None,
) -> Speedup:
    """Expected speedup of speculative over plain decoding: E[A] over the cost of a round.

    The target's input has b (1 + h K) tokens on average; padded to the longest draft of the batch,
    b (1 + (1 - (1 - h)^b) K). With h = 1 both are b (1 + K), and with free verify tokens the result is Leviathan's
    theorem 3.8 for every batch size. An argument out of its range raises UserInputError.
    """
    check_count("The batch size", batch_size)
    check_not_negative("The cost ratio", cost.cost_ratio)
    check_not_negative("The token cost", cost.token_cost)
    chances = survival(accuracy, draft_length, hit_rate=hit_rate, concentration=concentration)
    accepted = 1.0 + float(chances.sum())
    any_hit = 1.0 - (1.0 - hit_rate) ** batch_size
    return Speedup(
        *(
            accepted / cost.round_cost(draft_length, batch_size, batch_size * (1.0 + share * draft_length))
            for share in (hit_rate, any_hit)
        )
    )


def best_draft_length(
    accuracy: float,
    cost: StepCost,
    *,
    max_draft_length: int,
    batch_size: int = 1,
    hit_rate: float = 1.0,
    concentration: float | None = None,
) -> int:
    """The K of 1..max_draft_length with the highest unpadded speedup; 0 if none is faster than plain decoding.

    An argument out of its range raises UserInputError.
    """
    check_count("The largest draft length", max_draft_length)
    best, best_speedup = 0, 1.0
    for length in range(1, max_draft_length + 1):
        found = expected_speedup(
            accuracy, length, cost, batch_size=batch_size, hit_rate=hit_rate, concentration=concentration
        )
        if found.unpadded > best_speedup:
            best, best_speedup = length, found.unpadded
    return best
