"""Acceptance of draft tokens: modified rejection sampling, as pure functions of distributions and uniforms.

Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2 and theorem 1
(also Leviathan et al. 2023): whatever the draft, the tokens that come out follow the target's distribution.

A token that was not drawn (copied, forced) is accepted by one draw from the target: if it is that token, it stays, and
else the text goes on with what was drawn. That is accepted as often, and the text of a seed is plain decoding's,
whatever is copied: a copy may be of what the same numbers gave before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.sampling.device import FoundMasses, RowDistribution, to_host
from specexport_runtime.sampling.distribution import (
    Distribution,
    Drawable,
    Float64Array,
    HostDistribution,
    Int64Array,
    sample_token,
)
from specexport_runtime.sampling.rng import Draws

_FEW = 4096  # supports up to here are aligned by binary search


class Verdict(NamedTuple):
    """What became of one sequence's draft tokens in a round."""

    accepted: int  # leading draft tokens that stay; of a tree, the nodes of ``path``
    next_token: int  # after them, from the target: a correction or a bonus
    is_bonus: bool  # every draft token (of which there may be none) was accepted
    path: tuple[int, ...] | None = None  # places of the nodes that stay; None: the first ``accepted``

    def on_chain(self, length: int) -> int:
        """How many of the nodes that stay are of the draft's chain of ``length`` tokens."""
        return self.accepted if self.path is None else sum([place < length for place in self.path])

    @property
    def places(self) -> Sequence[int]:
        """Of the nodes that stay."""
        return range(self.accepted) if self.path is None else self.path


def accept_greedy(drafted: Sequence[int], greedy: Callable[[int], int]) -> Verdict:
    """Accept draft tokens as long as they equal the target's greedy choice; ``greedy(j)`` follows j draft tokens."""
    for j, token in enumerate(drafted):
        if token != (chosen := greedy(j)):
            return Verdict(j, chosen, is_bonus=False)
    return Verdict(len(drafted), greedy(len(drafted)), is_bonus=True)


def accept_sampled(
    drafted: Sequence[int],  # K draft tokens
    draft_distributions: Sequence[Distribution | None] | None,  # q of each; None, for all or one: it was not drawn
    # p of new position j, 0 <= j <= K. Called in order, and not for positions after the first rejection.
    target_distribution: Callable[[int], Distribution],
    draws: Callable[[int], Draws],  # the uniforms of new position j
) -> Verdict:
    """Accept draft token x with probability min(1, p(x)/q(x)); at the first rejection draw from max(0, p - q).

    q is the draft's distribution and p the target's, both after the request's logits processing. A token without q
    stays if it is what is drawn from p. CheckFailedError: a draft token has no probability above 0 in the distribution
    that it is said to come from.
    """
    j, target, token = find_first_refused(drafted, draft_distributions, target_distribution, draws)
    if token is None:
        rest = normalised(target, residual(target, cast("Sequence[Distribution]", draft_distributions)[j]))
        token = sample_token(rest, draws(j).resample)
    return Verdict(j, token, is_bonus=j == len(drafted))


def find_first_refused(
    drafted: Sequence[int],
    draft_distributions: Sequence[Distribution | None] | None,
    target_distribution: Callable[[int], Distribution],
    draws: Callable[[int], Draws],
) -> tuple[int, Distribution, int | None]:
    """The first place that :func:`accept_sampled` refuses, p there, and what it gives (None: a residual's draw)."""
    for j, token in enumerate(drafted):
        target = target_distribution(j)
        draft = None if draft_distributions is None else draft_distributions[j]
        if draft is None:
            drawn = sample_token(target, draws(j).resample)
            if drawn != token:
                return j, target, drawn
        # Multiplied out and strict: with u = 0 a token of target probability 0 is still refused.
        elif not draws(j).accept * draft_probability(draft, token, j) < target.probability(token):
            return j, target, None
    last = len(drafted)
    target = target_distribution(last)
    return last, target, sample_token(target, draws(last).resample)


def draft_probability(draft: Distribution, token: int, place: int) -> float:
    """Probability q of a draft token. CheckFailedError: it is not above 0."""
    probability = draft.probability(token)
    if not probability > 0.0:  # a NaN too
        raise CheckFailedError(
            f"Draft token {token} (position {place} of the round) has probability {probability:g} "
            "in its own draft distribution.",
            hint="the drafter must return the distribution that it drew the token from.",
        )
    return probability


def residual(target: Distribution, draft: Distribution, weight: float = 1.0) -> Float64Array | FoundMasses:
    """The masses max(0, w p - q), on the target's support, for a ``weight`` w in (0, 1].

    Either distribution may be dense or sparse; ids that only one has are probability 0 in the other. Of two rows that
    were asked for a draw, that alone is known of the masses.
    """
    if isinstance(target, RowDistribution) and (found := target.residual(draft, weight)) is not None:
        return found
    return _host_residual(to_host(target), to_host(draft), weight)


def _host_residual(target: HostDistribution, draft: HostDistribution, weight: float) -> Float64Array:
    masses = target.probs * weight
    if draft.token_ids is not None and target.token_ids is None:
        inside = draft.token_ids < len(masses)
        ids = draft.token_ids[inside]
        masses[ids] = np.maximum(masses[ids] - draft.probs[inside], 0.0)
    elif target.token_ids is None:
        shared = min(len(masses), len(draft.probs))
        np.subtract(masses[:shared], draft.probs[:shared], out=masses[:shared])
        np.maximum(masses, 0.0, out=masses)
    else:
        np.subtract(masses, _probabilities(draft, target.token_ids), out=masses)
        np.maximum(masses, 0.0, out=masses)
    return masses


def normalised(target: Distribution, masses: Float64Array | FoundMasses) -> Drawable:
    """The distribution proportional to ``masses``, in the target's form (dense or sparse).

    Without any mass it is the target's own: that needs p = q, where nothing can be rejected, so it only happens when p
    and q differ by rounding, and then p is right to rounding.
    """
    total = float(masses.sum())
    if total <= 0.0:
        return target
    if isinstance(masses, FoundMasses):
        return masses
    masses /= total
    return HostDistribution(to_host(target).token_ids, masses)


def _probabilities(distribution: HostDistribution, ids: Int64Array) -> Float64Array:
    """Probabilities of ascending ``ids``; 0 for ids that the distribution does not hold."""
    token_ids, probs = distribution
    if token_ids is not None and min(len(ids), len(token_ids)) <= _FEW:
        slots = token_ids.searchsorted(ids)
        np.minimum(slots, len(token_ids) - 1, out=slots)
        return np.where(token_ids[slots] == ids, probs[slots], 0.0)
    if token_ids is not None:  # many binary searches are slower than one table
        probs = np.zeros(int(token_ids[-1]) + 1)
        probs[token_ids] = distribution.probs
    known = int(ids.searchsorted(len(probs)))
    found = np.zeros(len(ids))
    found[:known] = probs[ids[:known]]
    return found
