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
    """One setting and context, drawn one way.

    Attributes:
        kind: ``"acceptance"`` or ``"engine"``.
        setting: name of the sampling parameters.
        prompt: index of the prompt whose end is the context.
        samples: outcomes drawn.
        depth: tokens of an outcome.
        cells: cells of the test; with 1 there is nothing to test.
        chi_square: Pearson's statistic.
        p_value: its tail probability.
        total_variation: distance between the drawn shares and the exact probabilities of the cells.
        expected_total_variation: its mean for exact draws, from sampling error alone.
        total_variation_limit: the largest distance that passes.
        impossible: outcomes drawn that the target gives probability 0; must be none.
        passed: p-value, distance and impossible outcomes are all within their limits.
    """

    kind: DrawKind
    setting: str
    prompt: int
    samples: int
    depth: int
    cells: int
    chi_square: float
    p_value: float
    total_variation: float
    expected_total_variation: float
    total_variation_limit: float
    impossible: int
    passed: bool


@dataclass(frozen=True)
class SamplingResult:
    """All tests of the sampling part.

    Attributes:
        passed: every test passed.
        tests: the tests.
        alpha: smallest p-value that passes a single test.
        control_p_value: p-value of the first chi-square test that has power when every draft token is accepted
            untested. A value above ``alpha`` says that this pair's draft is too close to its target for the test to see
            a mistake in acceptance.
        compared: what was compared, in words.
    """

    passed: bool
    tests: tuple[SamplingTest, ...]
    alpha: float
    control_p_value: float | None
    compared: str

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
    setting: str,
    prompt: int,
    partition: Partition,
    outcomes: Seq[Path],
    depth: int,
    alpha: float,
) -> SamplingTest:
    """Test outcomes against the exact probabilities of a partition.

    Args:
        kind: how they were drawn.
        setting: name of the sampling parameters.
        prompt: index of the prompt.
        partition: cells of outcomes of ``depth`` tokens.
        outcomes: what was drawn, at least one.
        depth: tokens of an outcome.
        alpha: smallest p-value that passes; also the error probability of the total-variation limit.
    """
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
