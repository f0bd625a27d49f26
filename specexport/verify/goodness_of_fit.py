"""What the sampling part finds, and the test of drawn outcomes against exact probabilities, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from specexport.verify.logit_tree import IMPOSSIBLE, Partition, Path
from specexport_runtime.sampling.distribution import Float64Array, Int64Array

DrawKind = Literal["acceptance", "engine", "trees"]

_EPSILON = 1e-15
_MAX_TERMS = 100_000


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


def assess_outcomes(
    kind: DrawKind,
    setting: str,  # name of the sampling parameters
    prompt: int,  # its index
    partition: Partition,  # cells of outcomes of ``depth`` tokens
    outcomes: Sequence[Path],  # at least one
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


def chi_square_tail(statistic: float, dof: int) -> float:
    """Probability that a chi-square variable with ``dof`` degrees of freedom is at least ``statistic``.

    This is Q(dof/2, statistic/2), by the series of its complement below the bulk and by its continued fraction above
    (NIST DLMF 8.7.1 and 8.9.2). ValueError for ``dof`` below 1 and ``statistic`` below 0.
    """
    if dof < 1 or not statistic >= 0.0:
        raise ValueError(f"chi_square_tail({statistic}, {dof}) is not defined")
    a, x = dof / 2, statistic / 2
    if x == 0.0:
        return 1.0
    if math.isinf(x):
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1.0 - front * _lower_series(a, x) if x < a + 1.0 else front * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    """Sum of x^n / (a (a+1) … (a+n))."""
    term = total = 1.0 / a
    for n in range(1, _MAX_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * _EPSILON:
            return total
    raise ArithmeticError(f"the incomplete gamma series at ({a}, {x}) does not converge")


def _upper_fraction(a: float, x: float) -> float:
    """1/(x+1-a - 1(1-a)/(x+3-a - 2(2-a)/(x+5-a - …))), by Lentz's method."""
    b = x + 1.0 - a
    c, d = math.inf, 1.0 / b
    result = d
    for n in range(1, _MAX_TERMS):
        step = -n * (n - a)
        b += 2.0
        d = 1.0 / (step * d + b)
        c = b + step / c
        result *= c * d
        if abs(c * d - 1.0) < _EPSILON * 4:
            return result
    raise ArithmeticError(f"the incomplete gamma fraction at ({a}, {x}) does not converge")


class PearsonResult(NamedTuple):
    """Pearson's chi-square test of counts against exact probabilities."""

    statistic: float  # sum over cells of (observed - expected)^2 / expected
    dof: int  # cells - 1; 0 if there is only one cell, where nothing can be tested
    # probability of a statistic at least this large if the probabilities are right; 1 without cells to test
    p_value: float


def pearson_test(counts: Int64Array, probabilities: Float64Array) -> PearsonResult:
    """Test ``counts`` [C] against ``probabilities`` [C], all above 0, which sum to 1 up to rounding."""
    dof = len(counts) - 1
    if dof == 0:
        return PearsonResult(0.0, 0, 1.0)
    if not counts.any():
        return PearsonResult(math.inf, dof, 0.0)
    expected = probabilities / probabilities.sum() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return PearsonResult(statistic, dof, chi_square_tail(statistic, dof))


def total_variation(counts: Int64Array, probabilities: Float64Array, num_samples: int) -> float:
    """Half the sum over cells of |observed share - probability|; samples outside all cells count as one more cell."""
    outside = 1.0 - float(counts.sum()) / num_samples
    return (float(np.abs(counts / num_samples - probabilities).sum()) + outside) / 2


def expected_total_variation(num_samples: int, probabilities: Float64Array) -> float:
    """Mean total variation between ``num_samples`` draws and the distribution they are drawn from.

    Exact: half the sum over cells of a binomial's mean absolute deviation, by de Moivre's formula
    ``2 (1-p)^(n-m) p^(m+1) (m+1) C(n, m+1)`` with ``m = floor(n p)`` (Diaconis and Zabell 1991).
    """
    return sum(_mean_deviation(num_samples, float(p)) for p in probabilities) / (2 * num_samples)


def _mean_deviation(n: int, p: float) -> float:
    m = math.floor(n * p)
    if p <= 0.0 or m >= n:
        return 0.0
    binomial = math.lgamma(n + 1) - math.lgamma(m + 2) - math.lgamma(n - m)
    return 2 * math.exp((n - m) * math.log1p(-p) + (m + 1) * math.log(p) + math.log(m + 1) + binomial)


def total_variation_limit(num_samples: int, probabilities: Float64Array, alpha: float) -> float:
    """The value that the total variation of true draws exceeds with probability at most ``alpha``.

    Changing one draw moves it by at most 1/n, so McDiarmid's inequality (1989) bounds the excess over its mean by
    ``sqrt(ln(1/alpha) / 2n)``, for any distribution.
    """
    return expected_total_variation(num_samples, probabilities) + math.sqrt(math.log(1 / alpha) / (2 * num_samples))
