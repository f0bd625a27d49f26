"""Logits processing against a plain full-sort reference, and drawing from its result."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.sampling import distribution, truncation
from specexport_runtime.sampling.distribution import HostDistribution, sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from tests.support.cases import chance


def reference(logits, params, prompt=(), output=()):
    """The documented processing, written the slow and obvious way. Returns {token: probability}."""
    z = np.asarray(logits, dtype=np.float32).copy()
    for token, bias in params.logit_bias.items():
        if token < len(z):
            z[token] = np.float32(z[token] + bias)
    z = z.astype(np.float64)
    for token in set(prompt) | set(output):
        if token < len(z):
            r = params.repetition_penalty
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
            z[token] -= params.frequency_penalty * list(output).count(token)
            z[token] -= params.presence_penalty * (token in output)
    order = sorted(range(len(z)), key=lambda i: (-np.float32(z[i]), i))
    if params.temperature == 0:
        return {order[0]: 1.0}
    weights = {i: math.exp((z[i] - z[order[0]]) / params.temperature) for i in order}
    if params.min_p > 0:
        weights = {i: w for i, w in weights.items() if w >= params.min_p * (1 - 1e-6)}
    if params.top_k > 0:
        weights = dict(list(weights.items())[: params.top_k])
    if params.top_p < 1:
        total, mass, kept = sum(weights.values()), 0.0, {}
        for i, w in weights.items():
            kept[i] = w
            mass += w / total
            if mass >= params.top_p - 1e-12:
                break
        weights = kept
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


def as_dict(distribution):
    ids = range(len(distribution.probs)) if distribution.token_ids is None else distribution.token_ids.tolist()
    return {i: p for i, p in zip(ids, distribution.probs.tolist(), strict=True) if p > 0}


def assert_same(got: HostDistribution, expected: dict[int, float], tolerance=1e-6):
    assert got.probs.dtype == np.float64
    assert abs(got.probs.sum() - 1) < 1e-12
    if got.token_ids is not None:
        assert got.token_ids.dtype == np.int64
        assert (np.diff(got.token_ids) > 0).all()
    actual = as_dict(got)
    assert set(actual) == {i for i, p in expected.items() if p > 1e-300}
    for token, p in actual.items():
        assert p == pytest.approx(expected[token], rel=tolerance, abs=1e-12)


# Quarter steps make exact ties and, with these temperatures, exact sums at the border of top-p common.
ROWS = st.lists(st.integers(-20, 20).map(lambda i: i / 4), min_size=1, max_size=40)
PARAMS = st.builds(
    SamplingParams, temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]), top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0, 5e-324, 1e-9, 0.1, 0.33, 0.5, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.25]), frequency_penalty=st.sampled_from([0.0, 0.0, 0.75, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.sampled_from([-1.0, 2.5]), max_size=3),
)  # fmt: skip
TOKENS = st.lists(st.integers(0, 39), max_size=8)


@pytest.fixture(params=["library", "numpy"], scope="module")
def way(request):
    """Cuts by the library of operators where it is, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr("specexport_runtime.sampling.sampler.open_host_rows", lambda *_: None)
        yield request.param


@pytest.mark.usefixtures("way")
@chance.examples(200)
@given(row=ROWS, params=PARAMS, prompt=TOKENS, output=TOKENS, drafted=TOKENS)
def test_small_rows_equal_the_full_sort_reference(row, params, prompt, output, drafted):
    sampler = Sampler(params, prompt, 40)
    sampler.append(output)
    logits = np.array(row, dtype=np.float32)
    before = logits.copy()
    got = sampler.distribution(logits, drafted)
    assert_same(got, reference(logits, params, prompt, output + drafted))
    np.testing.assert_array_equal(logits, before)
    again = sampler.distribution(logits, drafted)  # asking must leave no trace in the history
    np.testing.assert_array_equal(again.probs, got.probs)
    sampler.append(drafted)  # committed tokens count exactly as drafted ones do
    np.testing.assert_array_equal(sampler.distribution(logits).probs, got.probs)


def quantised(rng, size, spread, step):
    return (np.round(rng.normal(size=size) * spread / step) * step).astype(np.float32)


@pytest.mark.fuzz
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [257, 4096, 70_001])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("step", [1e-6, 0.5])
def test_large_rows_equal_the_full_sort_reference(size, spread, step):
    """Flat and peaked rows, with few ties and with thousands of them: every shortcut and its fallback."""
    rng = np.random.default_rng(chance.seed(size))
    logits = quantised(rng, size, spread, step)
    order = np.lexsort((np.arange(size), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / 0.8)
    cuts = ((0, 0.95), (0, 0.5), (0, 0.9999), (7, 1.0), (300, 1.0), (1200, 0.9), (0, 1e-6), (9, 5e-324), (0, 0))
    for top_k, top_p in cuts:
        kept = order if top_k == 0 else order[:top_k]
        mass = weights[: len(kept)].cumsum() / weights[: len(kept)].sum()
        count = len(kept) if top_p == 1 else int(mass.searchsorted(top_p)) + 1
        got = Sampler(SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p), [0], size).distribution(logits)
        ids = np.arange(size) if got.token_ids is None else got.token_ids
        # Sums in another order round differently: the cut may move by entries of no weight, never by more.
        slack = int(mass.searchsorted(top_p + 1e-9)) - int(mass.searchsorted(top_p - 1e-9)) if top_p < 1 else 0
        assert abs(len(ids) - min(count, len(kept))) <= slack
        np.testing.assert_array_equal(ids, np.sort(kept[: len(ids)]))
        expected = np.exp((logits[ids].astype(np.float64) - logits.max()) / 0.8)
        np.testing.assert_allclose(got.probs, expected / expected.sum(), rtol=1e-9)


def test_a_misleading_sample_falls_back_to_sorting(monkeypatch):
    """Large logits only where the strided sample does not look."""
    size = truncation._LARGE * 2
    logits = np.zeros(size, dtype=np.float32)
    step = size // truncation._SAMPLE
    logits[1::step] = np.linspace(2, 3, len(logits[1::step]))
    fallbacks = []
    original = truncation._cut_by_sorting
    monkeypatch.setattr(truncation, "_cut_by_sorting", lambda *args: fallbacks.append(1) or original(*args))
    got = Sampler(SamplingParams(temperature=1.0, top_p=0.3), [0], size).distribution(logits)
    assert fallbacks
    order = np.lexsort((np.arange(size), -logits))
    weights = np.exp(logits[order].astype(np.float64))
    count = int((weights.cumsum() / weights.sum()).searchsorted(0.3)) + 1
    np.testing.assert_array_equal(got.token_ids, np.sort(order[:count]))


def test_greedy_takes_the_lowest_id_of_ties_after_penalties():
    logits = np.array([1, 3, 3, 2], dtype=np.float32)
    plain = Sampler(SamplingParams(), [1], 4)
    assert plain.is_greedy
    assert plain.is_plain_greedy
    assert plain.greedy_token(logits) == 1
    assert as_dict(plain.distribution(logits)) == {1: 1.0}
    penalised = Sampler(SamplingParams(presence_penalty=2.0), [1], 4)
    assert penalised.is_greedy
    assert not penalised.is_plain_greedy
    assert penalised.greedy_token(logits) == 1
    assert penalised.greedy_token(logits, [1]) == 2
    penalised.append([1, 2])
    assert penalised.greedy_token(logits) == 3
    assert not Sampler(SamplingParams(logit_bias={0: 5.0}), [1], 4).is_plain_greedy
    assert not Sampler(SamplingParams(temperature=0.1), [1], 4).is_greedy


def test_logits_longer_or_shorter_than_the_vocabulary():
    params = SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.5, logit_bias={5: 9.0})
    sampler = Sampler(params, [4, 5], 6)
    sampler.append([5, 1])
    short = np.array([1, 2, 3, 4], dtype=np.float32)
    got = sampler.distribution(short, [5, 3])
    assert len(got.probs) == 4
    assert_same(got, reference(short, params, [4, 5], [5, 1, 5, 3]))
    padded = np.array([1, 2, 3, 4, 5, 6, 99, 99], dtype=np.float32)
    got = sampler.distribution(padded)
    assert_same(got, reference(padded[:6], params, [4, 5], [5, 1]))
    assert Sampler(SamplingParams(), [0], 6).greedy_token(padded) == 5


def test_banned_tokens_are_never_drawn():
    sampler = Sampler(SamplingParams(temperature=1.0, logit_bias={0: -math.inf, 2: -math.inf}), [], 3)
    got = sampler.distribution(np.array([9, 0, 9], dtype=np.float32))
    assert got.probs.tolist() == [0.0, 1.0, 0.0]
    assert {sample_token(got, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


@pytest.mark.parametrize("size", [4, 400, 40_000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, top_k=3),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
    ],
)
def test_nan_and_infinite_logits_are_refused(size, params):
    sampler = Sampler(params, [0], size)
    logits = np.zeros(size, dtype=np.float32)
    for value in (np.nan, np.inf):
        logits[size // 2] = value
        with pytest.raises(CheckFailedError, match=f"token {size // 2} is {value}"):
            sampler.distribution(logits)
    logits[size // 2] = np.nan
    with pytest.raises(CheckFailedError, match="NaN"):
        sampler.greedy_token(logits)
    with pytest.raises(InvalidRequestError, match="no token is possible"):
        sampler.distribution(np.full(size, -np.inf, dtype=np.float32))
    logits[:] = -np.inf
    logits[1] = 0
    assert as_dict(sampler.distribution(logits)) == {1: 1.0}


@pytest.mark.parametrize("temperature", [1e-300, 1e-10, 1e300])
@pytest.mark.parametrize("size", [8, 70_000])
def test_extreme_temperatures_and_logits_do_not_overflow(temperature, size):
    logits = np.linspace(-1, 1, size).astype(np.float32)
    logits[0] = np.finfo(np.float32).min
    for top_p in (1.0, 0.9):
        got = Sampler(SamplingParams(temperature=temperature, top_p=top_p), [], size).distribution(logits)
        assert abs(got.probs.sum() - 1) < 1e-9
        if temperature < 1:
            assert as_dict(got) == {size - 1: 1.0}


@pytest.mark.fuzz
@pytest.mark.parametrize("size", [1, 511, 4096, 4097, 10_000])
@pytest.mark.parametrize("sparse", [False, True])
def test_draws_invert_the_cumulative_distribution(size, sparse):
    rng = np.random.default_rng(chance.seed(size))
    probs = rng.random(size) * (rng.random(size) < 0.5) + 1e-9 * (np.arange(size) == size // 2)
    probs /= probs.sum()
    ids = np.arange(size) * 3 + 1 if sparse else None
    drawn_from = HostDistribution(ids, probs)
    cumulative = probs.cumsum()
    for u in [0.0, 1 - 2**-53, *rng.random(300)]:
        token = sample_token(drawn_from, u)
        index = (token - 1) // 3 if sparse else token
        assert probs[index] > 0
        assert cumulative[index] >= u - 1e-12
        assert cumulative[index] - probs[index] <= u + 1e-12
        assert drawn_from.probability(token) == probs[index]


def test_a_target_beyond_the_last_running_sum_gives_the_last_possible_token():
    """Block sums and running sums round differently, so a draw near 1 can overshoot its block."""
    masses = np.array([0.0, 0.5, 0.25, 0.0])
    assert distribution._first_above(masses.cumsum(), 0.75, masses) == 2
    assert distribution._first_above(masses.cumsum(), 0.7499, masses) == 2
    assert distribution._first_above(masses.cumsum(), 0.0, masses) == 1


def test_probability_of_absent_tokens_is_zero():
    for ids, absent in ((np.array([2, 5]), (0, 3, 6)), (None, (-1, 2))):
        found = HostDistribution(ids, np.array([0.25, 0.75]))
        assert [found.probability(token) for token in ((2, 5) if ids is not None else (0, 1))] == [0.25, 0.75]
        assert not any(found.probability(token) for token in absent)
