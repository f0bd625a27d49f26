"""What the sampling part finds, and the one test that judges drawn outcomes against exact probabilities."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specexport.verify.chi_square import (
    expected_total_variation,
    pearson_test,
    total_variation,
    total_variation_limit,
)
from specexport.verify.logit_tree import IMPOSSIBLE, Partition, Path

DrawKind = Literal["acceptance", "engine"]


@dataclass(frozen=True)
class SamplingTest:
    """One setting and context, drawn one way."""

    kind: DrawKind
    setting: str  # name of the sampling parameters
    prompt: int  # index of the prompt whose end is the context
    samples: int  # outcomes drawn
    depth: int  # tokens of an outcome
    cells: int  # of the test; with 1 there is nothing to test
    chi_square: float  # Pearson's statistic
    p_value: float
    total_variation: float  # distance between the drawn shares and the exact probabilities of the cells
    expected_total_variation: float  # its mean for exact draws, from sampling error alone
    total_variation_limit: float  # the largest distance that passes
    impossible: int  # outcomes drawn that the target gives probability 0; must be none
    passed: bool  # p-value, distance and impossible outcomes are all within their limits


@dataclass(frozen=True)
class SamplingResult:
    """All tests of the sampling part."""

    passed: bool
    tests: tuple[SamplingTest, ...]
    alpha: float  # smallest p-value that passes a single test
    # of the first test that has power, when every draft token is accepted untested; None without one. Above ``alpha``
    # the pair's draft is too close to its target for the test to see a mistake in acceptance.
    control_p_value: float | None
    compared: str  # in words

    @property
    def has_power(self) -> bool:
        """Whether any test had more than one possible outcome."""
        return any(test.cells > 1 for test in self.tests)

    @property
    def min_p_value(self) -> float:
        """Smallest p-value of all tests."""
        return min(test.p_value for test in self.tests)

    @property
    def max_total_variation(self) -> float:
        """Largest total-variation distance of all tests."""
        return max(test.total_variation for test in self.tests)


def judge(
    kind: DrawKind,
    setting: str,  # name of the sampling parameters
    prompt: int,  # its index
    partition: Partition,  # cells of outcomes of ``depth`` tokens
    outcomes: Seq[Path],  # at least one
    depth: int,
    alpha: float,  # smallest p-value that passes; also the error probability of the total-variation limit
) -> SamplingTest:
    """Test outcomes against the exact probabilities of a partition."""
    cells = [partition.cell(outcome) for outcome in outcomes]
    impossible = cells.count(IMPOSSIBLE)
    probabilities = partition.probabilities
    possible = np.array([cell for cell in cells if cell != IMPOSSIBLE], np.int64)
    counts = np.bincount(possible, minlength=len(probabilities))
    pearson = pearson_test(counts, probabilities)
    distance = total_variation(counts, probabilities, len(outcomes))
    limit = total_variation_limit(len(outcomes), probabilities, alpha)
    return SamplingTest(
        kind=kind,
        setting=setting,
        prompt=prompt,
        samples=len(outcomes),
        depth=depth,
        cells=len(probabilities),
        chi_square=pearson.statistic,
        p_value=pearson.p_value,
        total_variation=distance,
        expected_total_variation=expected_total_variation(len(outcomes), probabilities),
        total_variation_limit=limit,
        impossible=impossible,
        passed=impossible == 0 and pearson.p_value >= alpha and distance <= limit,
    )
