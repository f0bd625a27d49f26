"""The statistics against scipy, brute force and simulation."""

import math

import numpy as np
import pytest
from scipy import special, stats

from specexport.verify.goodness_of_fit import (
    chi_square_tail,
    expected_total_variation,
    pearson_test,
    total_variation,
    total_variation_limit,
)


@pytest.mark.parametrize("dof", [1, 2, 7, 85, 5000])
def test_tail_equals_scipy(dof):
    bulk = stats.chi2.ppf([1e-12, 1e-3, 0.1, 0.5, 0.9, 0.999], dof)
    far = stats.chi2.isf([1e-6, 1e-12, 1e-40, 1e-200], dof)
    for value in [*bulk, *far, float(dof), dof + 1.0, dof + 2.0]:
        assert chi_square_tail(value, dof) == pytest.approx(special.gammaincc(dof / 2, value / 2), rel=1e-9, abs=1e-300)


def test_pearson_equals_scipy():
    counts, probabilities = np.array([18, 55, 27]), np.array([0.2, 0.5, 0.3])
    result = pearson_test(counts, probabilities)
    expected = stats.chisquare(counts, probabilities * 100)
    assert (result.statistic, result.p_value) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
    assert result.dof == 2
    assert pearson_test(np.array([50]), np.array([1.0])).p_value == 1.0
    assert pearson_test(np.array([0, 0]), np.array([0.5, 0.5])).p_value == 0.0


def test_p_values_of_true_draws_are_uniform():
    random = np.random.default_rng(1)
    probabilities = np.array([0.5, 0.2, 0.1, 0.1, 0.06, 0.04])
    p_values = [pearson_test(random.multinomial(400, probabilities), probabilities).p_value for _ in range(2000)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_tail_at_its_ends():
    assert [chi_square_tail(value, 3) for value in (0.0, math.inf, 1e6)] == [1.0, 0.0, 0.0]
    for bad in [(-1.0, 3), (1.0, 0), (math.nan, 3)]:
        with pytest.raises(ValueError, match="not defined"):
            chi_square_tail(*bad)


@pytest.mark.parametrize("n", [1, 7, 100])
def test_expected_total_variation_is_the_exact_mean(n):
    probabilities = np.array([0.6, 0.3, 0.1, 0.0])
    k = np.arange(n + 1)
    exact = sum((stats.binom.pmf(k, n, p) * np.abs(k / n - p)).sum() for p in probabilities) / 2
    assert expected_total_variation(n, probabilities) == pytest.approx(exact)
    assert expected_total_variation(n, np.array([1.0])) == 0.0


def test_true_draws_stay_below_the_limit():
    random = np.random.default_rng(2)
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    found = [total_variation(random.multinomial(300, probabilities), probabilities, 300) for _ in range(3000)]
    assert np.mean(found) == pytest.approx(expected_total_variation(300, probabilities), rel=0.03)
    # McDiarmid's bound is safe: at most the stated share exceeds it.
    assert np.mean(np.array(found) > total_variation_limit(300, probabilities, 0.05)) <= 0.05
    for counts, distribution, distance in (
        ([50, 0], [1.0, 0.0], 0.5),
        ([100, 0], [0.0, 1.0], 1.0),
    ):  # samples outside all cells
        assert total_variation(np.array(counts), np.array(distribution), 100) == pytest.approx(distance)
