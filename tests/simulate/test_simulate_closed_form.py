"""The closed form against values worked by hand, enumeration, limits and orderings."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from specexport.simulate import model
from specexport_runtime.errors import UserInputError

FREE = model.StepPrice()
accuracies = st.floats(0, 1)
batch_sizes = st.integers(1, 40)
draft_lengths = st.integers(1, 12)


def enumerated(accuracies, draft_length, hit_rate=1.0):
    """E[mean A] and E[max A] by the probability of every combination of advances."""
    rows = []
    for a in accuracies:
        right = [hit_rate * a**k * (1 - a) for k in range(draft_length)]
        right[0] += 1 - hit_rate
        rows.append([*right, hit_rate * a**draft_length])
    mean = longest = 0.0
    for combination in itertools.product(range(draft_length + 1), repeat=len(rows)):
        chance = math.prod(row[x] for row, x in zip(rows, combination, strict=True))
        mean += chance * (1 + sum(combination) / len(rows))
        longest += chance * (1 + max(combination))
    return mean, longest


def test_values_worked_by_hand():
    # a = 1/2, n = 2, b = 2: E[A] = 1 + 1/2 + 1/4; E[max] = 1 + (1 - 1/4) + (1 - 9/16).
    assert model.batch_padding(0.5, 2, 2) == pytest.approx((1.75, 2.1875, 0.4375))
    assert model.batch_padding(0.5, 2, 2).ratio == pytest.approx(0.4375 / 1.75)
    # One certain and one hopeless sequence, n = 3: advances 4 and 1.
    assert model.mixed_padding([1.0, 0.0], 3) == pytest.approx((2.5, 4.0, 1.5))
    # A tiny accuracy keeps its precision, and the ends divide by nothing.
    assert model.batch_padding(1e-12, 2, 3).longest - 1 == pytest.approx(2e-12, rel=1e-3)
    with np.errstate(divide="raise", invalid="raise"):
        assert model.mixed_padding([0.0, 1.0, 1e-300], 12).longest == 13.0


@pytest.mark.parametrize("hit_rate", [1.0, 0.3])
@pytest.mark.parametrize("mixed", [[0.5], [0.2, 0.9], [0.0, 1.0, 0.6], [0.7, 0.7, 0.7]])
def test_equals_enumeration(mixed, hit_rate):
    found = model.mixed_padding(mixed, 4, hit_rate=hit_rate)
    assert found[:2] == pytest.approx(enumerated(mixed, 4, hit_rate))


@pytest.mark.parametrize("concentration", [0.5, 2.0, 30.0])
def test_moments_of_a_random_accuracy(concentration):
    alpha, beta = 0.7 * concentration, 0.3 * concentration
    expected = [special.beta(alpha + k, beta) / special.beta(alpha, beta) for k in range(1, 5)]
    assert model.survival(0.7, 4, concentration=concentration) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("accuracy", "advance"), [(0.0, 1.0), (1.0, 8.0)])
@pytest.mark.parametrize("concentration", [None, 3.0])
def test_certain_batches_have_no_padding(accuracy, advance, concentration):
    assert model.batch_padding(accuracy, 64, 7, concentration=concentration) == (advance, advance, 0.0)


@given(accuracies, accuracies, batch_sizes, draft_lengths)
def test_bounds_orderings_and_equal_batches(accuracy, other, batch_size, draft_length):
    found = model.batch_padding(accuracy, batch_size, draft_length)
    assert 1 <= found.accepted <= found.longest + 1e-12
    assert found.longest <= min(draft_length + 1, 1 + batch_size * (found.accepted - 1)) + 1e-9
    assert found == pytest.approx(model.mixed_padding([accuracy] * batch_size, draft_length))
    assert model.mixed_padding([accuracy, other], 3) == pytest.approx(model.mixed_padding([other, accuracy], 3))
    assert model.batch_padding(accuracy, 1, draft_length).padding == 0.0
    assert model.batch_padding(accuracy, batch_size + 1, draft_length).ratio >= found.ratio - 1e-12
    assert model.batch_padding(accuracy, batch_size, draft_length + 1).ratio >= found.ratio - 1e-12


def test_speedup_with_costs_by_hand():
    # 1 + a + ... + a^K (Leviathan et al. 2023, equation 1), to two places: free draft steps, free verify.
    for accuracy, draft_length, tokens in ((0.6, 2, 1.96), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert model.expected_speedup(accuracy, draft_length, FREE).unpadded == pytest.approx(tokens, abs=0.005)
    # a = 1/2, K = 1: 1.5 tokens. Draft steps at 1/4 of a target step: 1.5 / 1.25.
    assert model.expected_speedup(0.5, 1, model.StepPrice(cost_ratio=0.25)).unpadded == pytest.approx(1.2)
    # b = 2, token cost 1/2: a plain step costs 2, the verify step over 4 tokens 3: 1.5 / 1.5.
    assert model.expected_speedup(0.5, 1, model.StepPrice(token_cost=0.5), batch_size=2) == pytest.approx((1.0, 1.0))
    # Half of two sequences find a draft: 1.25 tokens; 3 tokens in the input, or 3.5 padded: 2.5 and 2.75 over 2.
    half = model.expected_speedup(0.5, 1, model.StepPrice(token_cost=0.5), batch_size=2, hit_rate=0.5)
    assert half == pytest.approx((1.25 / 1.25, 1.25 / 1.375))


@pytest.mark.parametrize("cost", [model.StepPrice(0.1), model.StepPrice(0.02, 0.05), model.StepPrice(0.9), FREE])
def test_best_draft_length_is_the_best(cost):
    speedups = {k: model.expected_speedup(0.8, k, cost, batch_size=4).unpadded for k in range(1, 13)}
    best = model.best_draft_length(0.8, cost, max_draft_length=12, batch_size=4)
    assert max(speedups.values()) == speedups[best] > 1 if best else max(speedups.values()) <= 1
    assert best == {model.StepPrice(0.9): 0, FREE: 12}.get(cost, best)
    assert model.best_draft_length(0.0, cost, max_draft_length=12) == 0


@pytest.mark.parametrize(
    "call",
    [
        *(lambda bad=bad: model.batch_padding(bad, 2, 3) for bad in (1.01, -0.01, math.nan)),
        lambda: model.batch_padding(0.5, 2, 0),
        lambda: model.batch_padding(0.5, 10**9, 10**9),
        lambda: model.batch_padding(0.5, 2, 3, hit_rate=1.5),
        lambda: model.batch_padding(0.5, 2, 3, concentration=0.0),
        lambda: model.mixed_padding([], 3),
        lambda: model.mixed_padding([0.5, 2.0], 3),
        lambda: model.expected_speedup(0.5, 3, model.StepPrice(-1.0)),
        lambda: model.expected_speedup(0.5, 3, model.StepPrice(0.0, math.inf)),
        lambda: model.expected_speedup(0.5, 3, FREE, batch_size=0),
        lambda: model.best_draft_length(0.5, FREE, max_draft_length=0),
        *(
            lambda a=a: model.simulate_rounds(model.Drafts(*a), 2, samples=10, seed=0)
            for a in ((1.5, 3), (0.5, 0), (0.5, 3, -1.0))
        ),
        lambda: model.simulate_rounds(model.Drafts(0.5, 3, concentration=-1.0), 2, samples=10, seed=0),
        lambda: model.simulate_rounds(model.Drafts(0.5, 3), 0, samples=10, seed=0),
        lambda: model.simulate_rounds(model.Drafts(0.5, 3), 2, samples=0, seed=0),
        lambda: model.simulate_generations(model.Drafts(0.5, 3), 2, max_new_tokens=0, samples=10, seed=0),
        lambda: model.simulate_generations(model.Drafts(0.5, 3), 2, max_new_tokens=4, samples=0, seed=0),
    ],
)
def test_what_is_out_of_range_is_refused(call):
    with pytest.raises(UserInputError) as caught:
        call()
    assert caught.value.hint
