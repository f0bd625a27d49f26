"""Simulation against the closed form, against exact generations by recursion, and against itself."""

import numpy as np
import pytest

from specexport.simulate.model import Drafts, batch_padding, generate, simulate_generations, simulate_rounds

LIMIT = 4.5  # standard errors; a right formula exceeds it once in 150000 comparisons
SAMPLES = 20000

MODELS = [
    Drafts(0.5, 7), Drafts(0.8, 4), Drafts(0.3, 1), Drafts(0.7, 7, hit_rate=0.4), Drafts(0.7, 7, concentration=2.0),
    Drafts(0.6, 5, hit_rate=0.8, concentration=10.0),
]  # fmt: skip


def within(estimate, expected):
    """Whether an estimate agrees with an expectation, as far as 20000 samples can tell."""
    error = max(estimate.standard_error, 1 / SAMPLES)  # an event too rare to be sampled leaves no spread
    return abs(estimate.mean - expected) <= LIMIT * error


def closed_form(drafts, batch_size):
    return batch_padding(
        drafts.accuracy, batch_size, drafts.draft_length,
        hit_rate=drafts.hit_rate, concentration=drafts.concentration,
    )  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("drafts", MODELS, ids=str)
def test_simulation_agrees_with_the_closed_form(drafts, batch_size):
    exact = closed_form(drafts, batch_size)
    found = simulate_rounds(drafts, batch_size, samples=SAMPLES, seed=1)
    for name in ("accepted", "longest", "padding", "ratio"):
        assert within(found[name], getattr(exact, name)), name


@pytest.mark.parametrize("drafts", MODELS, ids=str)
def test_wrong_formulas_do_not_agree(drafts):
    """The check above can fail: each formula here is wrong in one thing."""
    found = simulate_rounds(drafts, 8, samples=SAMPLES, seed=1)
    assert not within(found["longest"], closed_form(drafts, 7).longest)  # a sequence short
    exponents_from_zero = 1 + (closed_form(drafts, 8).accepted - 1) / drafts.accuracy
    assert not within(found["accepted"], exponents_from_zero)  # the first draft token taken for right
    target_left_out = found["padding"].mean / (found["accepted"].mean - 1)
    assert not within(found["ratio"], target_left_out)
    for one_kind in (drafts._replace(hit_rate=1.0), drafts._replace(concentration=None)):
        if one_kind != drafts:  # hit rate or spread ignored
            assert not within(found["ratio"], closed_form(one_kind, 8).ratio)


def test_certain_rounds_have_no_spread_one_sample_no_error_bar_and_one_sequence_no_padding():
    found = simulate_rounds(Drafts(1.0, 4, concentration=2.0), 3, samples=50, seed=0)
    assert (found["accepted"], found["ratio"], found["ratio"].deviations(0.0)) == ((5.0, 0.0), (0.0, 0.0), None)
    assert simulate_rounds(Drafts(0.5, 4), 3, samples=1, seed=0)["ratio"].standard_error is None
    alone = simulate_generations(Drafts(0.6, 4, concentration=2.0), 1, max_new_tokens=30, samples=50, seed=0)
    assert (alone["ratio"], alone["idle"], alone["cache_slots"]) == ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0))


def test_small_chunks_change_no_expectation(monkeypatch):
    monkeypatch.setattr("specexport.simulate.model.MAX_DRAFT_TOKENS", 100)
    found = simulate_rounds(Drafts(0.7, 5), 4, samples=2001, seed=2)
    assert within(found["ratio"], closed_form(Drafts(0.7, 5), 4).ratio)


def rounds_distribution(accuracy, draft_length, tokens):
    """P(rounds = r) of one sequence that generates ``tokens`` tokens, by recursion over what is left."""
    advance = [accuracy**k * (1 - accuracy) for k in range(draft_length)] + [accuracy**draft_length]
    of = [np.eye(1, tokens + 1)[0]]
    for left in range(1, tokens + 1):
        row = np.zeros(tokens + 1)
        for k, chance in enumerate(advance, start=1):
            row[1:] += chance * of[max(left - k, 0)][:-1]
        of.append(row)
    return of[tokens]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_rounds_and_idle_share_of_a_generation(batch_size):
    """The longest of b independent generations, and their mean, from the exact distribution of one."""
    accuracy, draft_length, tokens = 0.6, 4, 40
    distribution = rounds_distribution(accuracy, draft_length, tokens)
    assert distribution.sum() == pytest.approx(1.0)
    counts = np.arange(tokens + 1)
    longest = (1 - np.cumsum(distribution) ** batch_size).sum()
    own = (counts * distribution).sum()
    found = simulate_generations(
        Drafts(accuracy, draft_length), batch_size, max_new_tokens=tokens, samples=4000, seed=5
    )
    assert within(found["rounds"], longest)
    assert within(found["idle"], 1 - own / longest)
    assert not within(found["rounds"], longest - 0.2)


def test_a_generation_by_hand():
    """One sequence is always right and one never; n = 3, 8 tokens each, empty caches.

    In rounds 1 and 2 they advance by 4 and 1: 3 slots of padding each. Then the first is done, the second runs 6 rounds
    alone. A row of a round reads its cache and the step's 4 slots.
    """
    found = generate(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 8, 0, np.random.default_rng(0))
    padded = 2 * (0 + 4) + 2 * (4 + 4) + sum(length + 4 for length in range(8, 14))
    own = 2 * (0 + 4) + (4 + 4) + (1 + 4) + sum(length + 4 for length in range(2, 8))
    assert found[:, 0].tolist() == [8, 2 + 8, 3 + 3, padded, own]
    longer_prompt = generate(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 8, 100, np.random.default_rng(0))
    assert longer_prompt[:, 0].tolist() == [8, 10, 6, padded + 1000, own + 1000]
    # With 5 tokens each the first has one token left in round 2, and needs no more than the second: no padding there.
    shorter = generate(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 5, 0, np.random.default_rng(0))
    assert shorter[:3, 0].tolist() == [5, 2 + 5, 3]
