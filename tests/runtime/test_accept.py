"""Acceptance rules: single decisions, edge cases, and sparse against dense."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.sampling import accept
from specexport_runtime.sampling.accept import Verdict, accept_greedy, accept_sampled, normalised, residual
from specexport_runtime.sampling.distribution import HostDistribution, sample_token
from specexport_runtime.sampling.rng import Draws
from tests.support.cases import chance


def dense(*probs):
    return HostDistribution(None, np.array(probs, dtype=np.float64))


def sparse(**probs):
    return HostDistribution(np.array([int(k[1:]) for k in probs]), np.array(list(probs.values()), dtype=np.float64))


def normalised_residual(q, p, weight=1.0):
    return normalised(q, residual(q, p, weight))


def decide(q, p, token, accept_u, resample_u=0.5):
    return accept_sampled(
        [token], None if p is None else [p], lambda j: [q, q][j], lambda j: Draws(0.0, accept_u, resample_u)
    )


@pytest.mark.parametrize(
    ("drafted", "target", "verdict"),
    [
        ([], [7], Verdict(0, 7, True)),
        ([1, 2, 3], [1, 2, 3, 4], Verdict(3, 4, True)),
        ([1, 2, 3], [1, 5, 3, 4], Verdict(1, 5, False)),
        ([1, 2, 3], [0, 2, 3, 4], Verdict(0, 0, False)),
    ],
)
def test_greedy(drafted, target, verdict):
    assert accept_greedy(drafted, target.__getitem__) == verdict


def test_accepts_with_probability_q_over_p():
    q, p = dense(0.2, 0.8), dense(0.5, 0.5)
    assert decide(q, p, 0, np.nextafter(0.4, 0)).accepted == 1
    assert decide(q, p, 0, 0.4).accepted == 0
    assert decide(q, p, 1, 1 - 2**-53).accepted == 1
    for u in (0.0, 0.999):  # a token that was not drawn stays if it is what the target gives
        assert decide(q, None, 0, u, np.nextafter(0.2, 0)).accepted == 1
        assert decide(q, None, 0, u, 0.2) == Verdict(0, 1, False)
    for zero in (dense(0.0, 1.0), sparse(t1=1.0)):
        for p in (None, dense(0.5, 0.5), sparse(t0=1.0)):
            assert decide(zero, p, 0, 0.0) == Verdict(0, 1, False)


def test_token_zero_and_bonus():
    q = dense(1.0, 0.0)
    assert decide(q, q, 0, 0.9) == Verdict(1, 0, True)
    assert accept_sampled([], [], lambda j: q, lambda j: Draws(0, 0, 0.3)) == Verdict(0, 0, True)
    assert accept_sampled([], None, lambda j: q, lambda j: Draws(0, 0, 0.3)) == Verdict(0, 0, True)


def test_each_position_uses_its_own_draws_and_no_row_behind_a_rejection_is_asked_for():
    asked, q = [], dense(0.5, 0.5)
    table = [Draws(0, 0.1, 0.9), Draws(0, 0.1, 0.9), Draws(0, 0.7, 0.9), Draws(0, 0.9, 0.9)]
    drawn_from = [dense(0.8, 0.2)] * 4
    verdict = accept_sampled([0, 0, 0, 0], drawn_from, lambda j: (asked.append(j), q)[1], lambda j: table[j])
    assert (verdict, asked) == (Verdict(2, 1, False), [0, 1, 2])
    for copied in (None, [None] * 2):
        assert accept_sampled([1, 1], copied, lambda j: q, lambda j: table[j]) == Verdict(2, 1, True)


def test_a_token_that_its_draft_cannot_draw_is_an_error():
    q = dense(0.5, 0.5)
    for p in (dense(1.0, 0.0), sparse(t0=1.0), dense(1.0)):
        with pytest.raises(CheckFailedError, match="probability 0 in its own draft"):
            decide(q, p, 1, 0.5)


def test_residual_by_hand():
    q, p = dense(0.5, 0.3, 0.2), dense(0.1, 0.6, 0.3)
    np.testing.assert_allclose(normalised_residual(q, dense(0.4, 0.6)).probs, [1 / 3, 0, 2 / 3])
    np.testing.assert_allclose(normalised_residual(dense(0.4, 0.6), dense(0.3, 0.3, 0.4)).probs, [0.25, 0.75])
    for found in (normalised_residual(q, dense(0, 1, 0)), normalised_residual(q, sparse(t1=1.0))):
        np.testing.assert_allclose(found.probs, [5 / 7, 0, 2 / 7])
    np.testing.assert_allclose(normalised_residual(q, p, 0.5).probs, [1, 0, 0])
    np.testing.assert_allclose(residual(q, dense(0.1, 0.1), 0.5), [0.15, 0.05, 0.1])
    assert q.probs.tolist() == [0.5, 0.3, 0.2]  # inputs are never changed


def test_all_zero_residual_falls_back_to_the_target():
    q = dense(0.25, 0.75)
    for result in (normalised_residual(q, q), normalised_residual(q, dense(0.3, 0.75))):
        assert np.isfinite(result.probs).all()
        assert abs(result.probs.sum() - 1) < 1e-12
    s = sparse(t3=1.0)
    assert normalised_residual(s, s).probs.tolist() == [1.0]


WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=9).filter(any)


def both_forms(weights):
    probs = np.array(weights) / sum(weights)
    support = np.flatnonzero(probs)
    return HostDistribution(None, probs), HostDistribution(support, probs[support])


def padded(distribution, size):
    full = np.zeros(size)
    ids = np.arange(len(distribution.probs)) if distribution.token_ids is None else distribution.token_ids
    full[ids] = distribution.probs
    return full


@chance.examples(150)
@given(q=WEIGHTS, p=WEIGHTS, seed=st.integers(0, 2**32))
def test_sparse_and_dense_decide_alike(q, p, seed):
    rng = np.random.default_rng(seed)
    draws = Draws(*rng.random(3))
    targets, drafts = both_forms(q), both_forms(p)
    token = sample_token(drafts[0], draws.draft)
    assert sample_token(drafts[1], draws.draft) == token
    verdicts = {
        accept_sampled([token], [draft], lambda j, t=target: t, lambda j: draws)
        for target in targets
        for draft in drafts
    }
    assert len(verdicts) == 1
    one_hot = {accept_sampled([token], None, lambda j, t=target: t, lambda j: draws) for target in targets}
    assert len(one_hot) == 1
    full_q, full_p = padded(targets[0], 9), padded(drafts[0], 9)
    expected = np.maximum(full_q - full_p, 0)
    if expected.sum() > 0:
        for target in targets:
            for draft in drafts:
                np.testing.assert_allclose(
                    padded(normalised_residual(target, draft), 9), expected / expected.sum(), atol=1e-12
                )


@pytest.mark.fuzz
def test_large_supports_are_aligned_like_small_ones(monkeypatch):
    """Above a size the alignment uses a table; it must agree with binary search."""
    rng = np.random.default_rng(chance.seed(1))
    for low, high in [(0, 9000), (5000, 30_000), (20_000, 30_000)]:
        q_ids = np.sort(rng.choice(20_000, 8000, replace=False))
        p_ids = np.sort(rng.choice(np.arange(low, high), 6000, replace=False))
        q = HostDistribution(q_ids, rng.dirichlet(np.ones(8000)))
        p = HostDistribution(p_ids, rng.dirichlet(np.ones(6000)))
        by_table = normalised_residual(q, p)
        monkeypatch.setattr(accept, "_FEW", 10**9)
        by_search = normalised_residual(q, p)
        monkeypatch.undo()
        np.testing.assert_array_equal(by_table.probs, by_search.probs)
