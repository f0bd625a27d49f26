"""The closed form against values worked by hand, enumeration, limits and orderings."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from specexport.simulate.model import (
    StepCost,
    batch_padding,
    best_draft_length,
    expected_speedup,
    mixed_padding,
    survival,
)
from specexport_runtime.errors import UserInputError

FREE = StepCost()
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
    # a = 1/2, n = 1: A is 1 or 2, each with 1/2. Two sequences: max is 2 unless both are 1, so 1 + 3/4.
    assert batch_padding(0.5, 2, 1) == pytest.approx((1.5, 1.75, 0.25))
    assert batch_padding(0.5, 2, 1).ratio == pytest.approx(1 / 6)
    # a = 1/2, n = 2, b = 2: E[A] = 1 + 1/2 + 1/4; E[max] = 1 + (1 - 1/4) + (1 - 9/16).
    assert batch_padding(0.5, 2, 2) == pytest.approx((1.75, 2.1875, 0.4375))
    # One certain and one hopeless sequence, n = 3: advances 4 and 1.
    assert mixed_padding([1.0, 0.0], 3) == pytest.approx((2.5, 4.0, 1.5))
    # A draft found half the time and then always right, n = 2, b = 2: advance 3 or 1.
    assert batch_padding(1.0, 2, 2, hit_rate=0.5) == pytest.approx((2.0, 2.5, 0.5))


@pytest.mark.parametrize(
    ("accuracy", "draft_length", "tokens"),
    # 1 + a + ... + a^K (Leviathan et al. 2023, equation 1), to two places: free draft steps, free verify.
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_speedup_of_free_drafts_is_the_tokens_of_a_round(accuracy, draft_length, tokens):
    assert expected_speedup(accuracy, draft_length, FREE).unpadded == pytest.approx(tokens, abs=0.005)


@pytest.mark.parametrize("hit_rate", [1.0, 0.3])
@pytest.mark.parametrize("mixed", [[0.5], [0.2, 0.9], [0.0, 1.0, 0.6], [0.7, 0.7, 0.7]])
def test_equals_enumeration(mixed, hit_rate):
    found = mixed_padding(mixed, 4, hit_rate=hit_rate)
    assert found[:2] == pytest.approx(enumerated(mixed, 4, hit_rate))


@pytest.mark.parametrize("concentration", [0.5, 2.0, 30.0])
def test_moments_of_a_random_accuracy(concentration):
    alpha, beta = 0.7 * concentration, 0.3 * concentration
    expected = [special.beta(alpha + k, beta) / special.beta(alpha, beta) for k in range(1, 5)]
    assert survival(0.7, 4, concentration=concentration) == pytest.approx(expected, rel=1e-9)


def test_many_alike_sequences_equal_one_accuracy():
    alike = batch_padding(0.7, 8, 7, concentration=1e9)
    assert alike == pytest.approx(batch_padding(0.7, 8, 7), rel=1e-6)
    assert batch_padding(0.7, 8, 7, concentration=2.0).ratio != pytest.approx(alike.ratio, rel=0.01)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize(("accuracy", "advance"), [(0.0, 1.0), (1.0, 8.0)])
@pytest.mark.parametrize("concentration", [None, 3.0])
def test_certain_batches_have_no_padding(accuracy, advance, batch_size, concentration):
    assert batch_padding(accuracy, batch_size, 7, concentration=concentration) == (advance, advance, 0.0)


@given(accuracies, draft_lengths)
def test_one_sequence_has_no_padding(accuracy, draft_length):
    assert batch_padding(accuracy, 1, draft_length).padding == 0.0


@given(accuracies, batch_sizes, draft_lengths)
def test_bounds_and_equal_batches(accuracy, batch_size, draft_length):
    found = batch_padding(accuracy, batch_size, draft_length)
    assert 1 <= found.accepted <= found.longest + 1e-12
    assert found.longest <= min(draft_length + 1, 1 + batch_size * (found.accepted - 1)) + 1e-9
    assert 0 <= found.ratio < draft_length
    assert found == pytest.approx(mixed_padding([accuracy] * batch_size, draft_length))


@given(accuracies, batch_sizes, draft_lengths)
def test_padding_grows_with_the_batch_and_the_draft(accuracy, batch_size, draft_length):
    here = batch_padding(accuracy, batch_size, draft_length).ratio
    assert batch_padding(accuracy, batch_size + 1, draft_length).ratio >= here - 1e-12
    assert batch_padding(accuracy, batch_size, draft_length + 1).ratio >= here - 1e-12


@given(accuracies, accuracies, batch_sizes, draft_lengths)
def test_longest_grows_with_the_accuracy(one, other, batch_size, draft_length):
    low, high = (batch_padding(accuracy, batch_size, draft_length) for accuracy in sorted((one, other)))
    assert low.longest <= high.longest + 1e-12
    assert low.accepted <= high.accepted + 1e-12


@given(st.lists(accuracies, min_size=1, max_size=12), draft_lengths, st.randoms())
def test_order_of_the_sequences_does_not_matter(mixed, draft_length, random):
    shuffled = random.sample(mixed, len(mixed))
    assert mixed_padding(shuffled, draft_length) == pytest.approx(mixed_padding(mixed, draft_length))


def test_tiny_accuracies_keep_their_precision():
    found = batch_padding(1e-12, 2, 3)
    assert found.longest - 1 == pytest.approx(2e-12, rel=1e-3)


def test_speedup_with_costs_by_hand():
    # a = 1/2, K = 1: 1.5 tokens. Draft steps at 1/4 of a target step: 1.5 / 1.25.
    assert expected_speedup(0.5, 1, StepCost(cost_ratio=0.25)).unpadded == pytest.approx(1.2)
    # b = 2, token cost 1/2: a plain step costs 2, the verify step over 4 tokens 3: 1.5 / 1.5.
    assert expected_speedup(0.5, 1, StepCost(token_cost=0.5), batch_size=2) == pytest.approx((1.0, 1.0))
    # Half of two sequences find a draft: 1.25 tokens; 3 tokens in the input, or 3.5 padded: 2.5 and 2.75 over 2.
    half = expected_speedup(0.5, 1, StepCost(token_cost=0.5), batch_size=2, hit_rate=0.5)
    assert half == pytest.approx((1.25 / 1.25, 1.25 / 1.375))


@given(accuracies, draft_lengths, batch_sizes, st.floats(0, 1), st.floats(0, 2), st.floats(0, 2))
def test_padding_the_input_never_helps(accuracy, draft_length, batch_size, hit_rate, cost_ratio, token_cost):
    cost = StepCost(cost_ratio, token_cost)
    found = expected_speedup(accuracy, draft_length, cost, batch_size=batch_size, hit_rate=hit_rate)
    assert found.padded <= found.unpadded * (1 + 1e-12)
    dearer = cost._replace(token_cost=token_cost + 0.1)
    assert expected_speedup(
        accuracy, draft_length, dearer, batch_size=batch_size, hit_rate=hit_rate
    ).unpadded <= found.unpadded * (1 + 1e-12)


@pytest.mark.parametrize("cost", [StepCost(0.1), StepCost(0.02, 0.05), StepCost(0.9), FREE])
def test_best_draft_length_is_the_best(cost):
    speedups = {k: expected_speedup(0.8, k, cost, batch_size=4).unpadded for k in range(1, 13)}
    best = best_draft_length(0.8, cost, max_draft_length=12, batch_size=4)
    if best == 0:
        assert max(speedups.values()) <= 1
    else:
        assert speedups[best] == max(speedups.values()) > 1
    assert best == {StepCost(0.9): 0, FREE: 12}.get(cost, best)
    assert best_draft_length(0.0, cost, max_draft_length=12) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: batch_padding(1.01, 2, 3),
        lambda: batch_padding(-0.01, 2, 3),
        lambda: batch_padding(math.nan, 2, 3),
        lambda: batch_padding(0.5, 0, 3),
        lambda: batch_padding(0.5, 2, 0),
        lambda: batch_padding(0.5, 10**9, 10**9),
        lambda: batch_padding(0.5, 2, 3, hit_rate=1.5),
        lambda: batch_padding(0.5, 2, 3, concentration=0.0),
        lambda: mixed_padding([], 3),
        lambda: mixed_padding([0.5, 2.0], 3),
        lambda: expected_speedup(0.5, 3, StepCost(-1.0)),
        lambda: expected_speedup(0.5, 3, StepCost(0.0, math.inf)),
        lambda: expected_speedup(0.5, 3, FREE, batch_size=0),
        lambda: best_draft_length(0.5, FREE, max_draft_length=0),
    ],
)
def test_refuses_what_is_out_of_range(call):
    with pytest.raises(UserInputError) as caught:
        call()
    assert caught.value.hint


def test_no_division_by_zero_at_the_ends():
    with np.errstate(divide="raise", invalid="raise"):
        found = mixed_padding([0.0, 1.0, 1e-300], 12)
    assert found.longest == 13.0
    assert expected_speedup(1.0, 12, FREE).unpadded == 13.0
    assert expected_speedup(0.0, 12, FREE).unpadded == 1.0
