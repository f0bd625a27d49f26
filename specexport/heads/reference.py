"""What a draft head is to give in ragged steps of two rows: its kind computes that in torch, for the build's proof."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CHECK_CAPACITY = 32
CHECK_LENS, CHECK_STEPS = (11, 8), ((5, 2), (3, 1), (1, 3), (1, 1), (1, 1))
"""Tokens of the two sequences, in all and in each step: several, one, and one of each row alone."""


class CheckedRow(NamedTuple):
    """What one sequence is fed in a step, and what comes of it in torch."""

    tokens: np.ndarray  # input ids, int64 [n]
    features: np.ndarray  # float32 [n, E]
    kept: int  # how many of these entries are committed
    logits: np.ndarray  # of the last r entries, which want logits [r, N]
    handed_on: np.ndarray  # of the same [r, E]


class LentRows(NamedTuple):
    """What a head that reads the target's caches finds in them."""

    caches: Mapping[str, np.ndarray]  # by name [2, 1, H, L, D]
    lens: Sequence[tuple[int, int]]  # entries of the two rows, in each step

    def lend(self, layers: Sequence[int]) -> dict[str, np.ndarray]:  # noqa: ARG002 - it has those that are asked for
        """See ``CacheLender.lend``."""
        return dict(self.caches)


class HeadReference(NamedTuple):
    """What a head is checked against."""

    steps: Sequence[Sequence[CheckedRow]]  # the two rows of each step
    lent: LentRows | None = None  # of a head without a cache


def causal_reference(
    tokens: Sequence[np.ndarray],
    features: Sequence[np.ndarray],
    logits: Sequence[np.ndarray],
    handed_on: Sequence[np.ndarray],
) -> HeadReference:
    """Ragged steps of a causal head, from what it computes of whole sequences of ``CHECK_LENS`` tokens."""
    steps: list[list[CheckedRow]] = []
    done = [0, 0]
    for counts in CHECK_STEPS:
        steps.append([])
        for row, count in enumerate(counts):
            span = slice(done[row], done[row] + count)
            given = tokens[row][span], features[row][span], count
            steps[-1].append(CheckedRow(*given, logits[row][span], handed_on[row][span]))
            done[row] += count
    return HeadReference(steps)
