"""Cuts of candidates by the library of operators are those of ``truncation``, and what a refusal leaves of two too."""

import numpy as np
import pytest

from specexport_runtime.executors.device_rows import DeviceRow, Lane
from specexport_runtime.executors.row_cuts import RowCuts
from specexport_runtime.executors.row_kernels import ASK, FOUND, K_INLINE, RowFound
from specexport_runtime.sampling.accept import normalised, residual
from specexport_runtime.sampling.device import TruncatedDistribution, on_host, row_distribution
from specexport_runtime.sampling.distribution import HostDistribution
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from specexport_runtime.sampling.truncation import cut_softmax
from tests.support.cases import chance
from tests.support.cases.laws import DISTRIBUTIONS

WIDTH = 5000


def candidates(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.permutation(WIDTH)[:count].astype(np.int32)
    kinds = (rng.normal(size=count) * 3, rng.integers(-2, 2, count), np.zeros(count), -rng.exponential(30, count))
    return ids, kinds[rng.integers(4)].astype(np.float32)


def make_rows(samplers, uniforms, tokens, found) -> list[DeviceRow]:
    count = len(samplers)
    lane = Lane(0, 0, np.zeros((count, ASK)), np.zeros(count * (FOUND + K_INLINE)))
    asks = [s.ask(u, WIDTH, t) for s, u, t in zip(samplers, uniforms, tokens, strict=True)]
    lane.set_rules(tuple(ask.rule for ask in asks))
    lane.asks[:, 2:4] = list(zip(uniforms, tokens, strict=True))
    inline = lane.found[FOUND * count :]
    ids, values = inline.view(np.int32)[: K_INLINE * count], inline.view(np.float32)[K_INLINE * count :]
    answers = []
    for i, (given, logits) in enumerate(found):
        peak = np.float64(logits.max(initial=-np.inf))
        total = 1.25 * np.exp((logits.astype(np.float64) - peak) / samplers[i].params.temperature).sum()
        answers.append(RowFound(peak, total, 0.0, 0.0, 0.0, len(given), 0.0, 0.0))
        here = slice(K_INLINE * i, K_INLINE * i + min(len(given), K_INLINE))
        ids[here], values[here] = given[:K_INLINE], logits[:K_INLINE]
    lane.found[: FOUND * count] = np.ravel(answers)
    address = lane.host_found + 8 * FOUND * count
    cuts = RowCuts(count, K_INLINE, lane.host_asks, lane.host_found, lane.host_kept_masses, address)
    rows = [DeviceRow(None, i, ask, answer, 0, 0, 0) for i, (ask, answer) in enumerate(zip(asks, answers, strict=True))]
    for row in rows:
        row.cuts = cuts
    return rows


def host_distribution(row: DeviceRow, params: SamplingParams, found) -> HostDistribution:
    order = found[0].argsort()
    ids, values = found[0][order].astype(np.int64), found[1][order]
    return cut_softmax(values, params, row.found.peak, ids, row.found.total if row.ask.rule.top_p else None)


@pytest.mark.fuzz
def test_cuts_and_residuals_are_the_hosts():
    rng = np.random.default_rng(chance.seed(5))
    for _ in range(chance.many(60)):
        params = [
            SamplingParams(temperature=float(rng.uniform(0.1, 2)), **DISTRIBUTIONS[rng.integers(len(DISTRIBUTIONS))])
            for _ in range(6)
        ]
        found = [candidates(rng, int(rng.integers(1, K_INLINE + 1))) for _ in params]
        tokens = [int(given[rng.integers(len(given))]) for given, _ in found]
        uniforms = [0.0, 1 - 2**-53, *rng.random(4).tolist()]
        samplers = [Sampler(each, [1], WIDTH) for each in params]
        rows = make_rows(samplers, uniforms, tokens, found)
        distributions = [row_distribution(row, each) for row, each in zip(rows, params, strict=True)]
        hosts = [host_distribution(*each) for each in zip(rows, params, found, strict=True)]
        for distribution, host, u, token in zip(distributions, hosts, uniforms, tokens, strict=True):
            assert isinstance(distribution, TruncatedDistribution)
            np.testing.assert_array_equal(on_host(distribution).token_ids, host.token_ids)
            np.testing.assert_allclose(on_host(distribution).probs, host.probs, rtol=1e-12)
            np.testing.assert_allclose(distribution.top, host.top, rtol=1e-12)
            np.testing.assert_allclose(distribution.probability(token), host.probability(token), rtol=1e-12)
            assert distribution.draw(u) == host.draw(u) or abs(host.probs.cumsum() - u).min() < 1e-12
        for place, other in enumerate(rng.permutation(6)):
            weight = float(rng.uniform(0.3, 1))
            masses = residual(distributions[place], distributions[other], weight)
            expected = residual(hosts[place], hosts[other], weight)
            np.testing.assert_allclose(masses.sum(), expected.sum(), rtol=1e-9, atol=1e-14)
            if expected.sum() > 1e-9:
                u, running = uniforms[place], expected.cumsum() / expected.sum()
                drawn = normalised(distributions[place], masses).draw(u)
                assert drawn == normalised(hosts[place], expected).draw(u) or abs(running - u).min() < 1e-9


def test_rows_without_candidates_or_with_more_than_come_are_left_out():
    rng, sampler = np.random.default_rng(1), Sampler(SamplingParams(temperature=1.0, top_k=3), [1], WIDTH)
    found = [candidates(rng, count) for count in (5, 0, K_INLINE + 1, 2)]
    rows = make_rows([sampler] * 4, [0.5] * 4, [-1] * 4, found)
    assert [row.cuts.numbers[i][0] for i, row in enumerate(rows)] == [3, 0, 0, 2]
