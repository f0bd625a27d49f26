"""Token distributions, dense or sparse, and drawing from them."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_BLOCK = 512  # entries per block sum; a draw scans the block sums and then one block
_SMALL = 4096  # below this one running sum is cheaper than two


class Drawable(Protocol):
    """What a token can be drawn from, wherever it lies."""

    def draw(self, u: float) -> int:
        """See :func:`sample_token`."""
        ...


class Distribution(Drawable, Protocol):
    """A distribution over token ids, wherever it lies."""

    @property
    def top(self) -> float:
        """Probability of the likeliest token."""
        ...

    def probability(self, token: int) -> float:
        """Probability of one token."""
        ...


class HostDistribution(NamedTuple):
    """A distribution over token ids: exactly the one that is drawn from and tested against."""

    token_ids: Int64Array | None  # [n], ascending ids of the support; None: dense, the id is the index
    probs: Float64Array  # [n], sums to 1

    @property
    def top(self) -> float:
        """Probability of the likeliest token."""
        return float(self.probs.max())

    def probability(self, token: int) -> float:
        """Probability of one token; 0 when the distribution does not hold it."""
        if self.token_ids is None:
            return float(self.probs[token]) if 0 <= token < len(self.probs) else 0.0
        index = int(self.token_ids.searchsorted(token))
        if index == len(self.token_ids) or self.token_ids[index] != token:
            return 0.0
        return float(self.probs[index])

    def draw(self, u: float) -> int:
        """See :func:`sample_token`."""
        index = _locate(self.probs, u) if len(self.probs) <= _SMALL else _locate_blocked(self.probs, u)
        return index if self.token_ids is None else int(self.token_ids[index])


def one_hot(token: int) -> HostDistribution:
    """The distribution that always gives ``token``."""
    return HostDistribution(np.array([token], dtype=np.int64), np.ones(1))


def sample_token(drawn_from: Drawable, u: float) -> int:
    """The token at ``u`` in [0, 1) of the inverse cumulative distribution, ids ascending, never of probability 0."""
    return drawn_from.draw(u)


def _locate(probs: Float64Array, u: float) -> int:
    cumulative = probs.cumsum()
    return _first_above(cumulative, u * cumulative[-1], probs)


def _locate_blocked(probs: Float64Array, u: float) -> int:
    blocks = np.add.reduceat(probs, np.arange(0, len(probs), _BLOCK))
    cumulative = blocks.cumsum()
    target = u * cumulative[-1]
    block = _first_above(cumulative, target, blocks)
    start = block * _BLOCK
    inside = probs[start : start + _BLOCK]
    before = cumulative[block - 1] if block else 0.0
    return start + _first_above(inside.cumsum(), target - before, inside)


def _first_above(cumulative: Float64Array, target: float, masses: Float64Array) -> int:
    """First index whose running sum exceeds ``target`` (0 or more), or, by rounding, the last entry with mass."""
    index = int(cumulative.searchsorted(target, side="right"))
    return index if index < len(cumulative) else int(masses.nonzero()[0][-1])
