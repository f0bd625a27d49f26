"""Rows of logits that the operators draw from on a CPU: distributions, draws and errors are those of numpy."""

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.host_rows import HostRows
from specexport_runtime.executors.row_kernels import MAX_CUT, NOTHING
from specexport_runtime.sampling.accept import normalised, residual
from specexport_runtime.sampling.device import RowDistribution, to_host
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from tests.support.cases import chance
from tests.support.cases.laws import DISTRIBUTIONS
from tests.support.fakes.loop import finish, make_decoder, make_draft, make_sequence, make_target


def make_rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    rows = (2.5 * rng.normal(size=(count, width))).astype(np.float32)
    for row in rows:
        kind = rng.integers(5)
        if kind < 2:
            head = rng.permutation(width)[:200]
            row[head] += 16 - 2 * np.log(np.arange(1, len(head) + 1))
        elif kind == 2:
            row[:] = rng.integers(-3, 3, width)
        elif kind == 3:
            row[rng.random(width) < 0.7] = -np.inf
            row[0] = 3
    rows *= rng.choice([0.1, 1.0, 30.0], (count, 1)).astype(np.float32)
    return rows


def is_at(probs: np.ndarray, place: int, u: float, slack: float = 1e-11) -> bool:
    """Whether a uniform gives a place, or misses it by rounding only."""
    running = np.concatenate([[0.0], probs.cumsum()]) / probs.sum()
    return probs[place] > 0 and running[place] - slack <= u <= running[place + 1] + slack


def dense(distribution, width):
    numbers = to_host(distribution)
    full = np.zeros(width)
    full[slice(len(numbers.probs)) if numbers.token_ids is None else numbers.token_ids] = numbers.probs
    return full


@pytest.mark.fuzz
@pytest.mark.parametrize("given", [{}, *DISTRIBUTIONS], ids=str)
def test_distributions_and_residuals_are_the_hosts(given):
    rng = np.random.default_rng(chance.seed(2))
    for _ in range(chance.many(12)):
        width, used = int(rng.choice([3, 40, 511, 512, 513, 2000, 20_000])), 0
        used = width - int(rng.integers(0, min(width, 40)))
        sampler = Sampler(SamplingParams(temperature=float(rng.uniform(0.2, 2)), **given), [1], used)
        target, draft = HostRows(width, 2), HostRows(width, 2)
        rows, others = make_rows(rng, 3, width), make_rows(rng, 3, width)
        uniforms, tokens = [0.0, 1 - 2**-53, rng.random()], rng.integers(0, used, 3).tolist()
        kept = draft.collect([sampler.ask(0.5, width, slot=i) for i in range(3)], others)
        drafts = [sampler.make_row_distribution(row) for row in kept]
        asked = target.collect([sampler.ask(u, width, t) for u, t in zip(uniforms, tokens, strict=True)], rows)
        for i, (u, token) in enumerate(zip(uniforms, tokens, strict=True)):
            distribution, host = sampler.make_row_distribution(asked[i]), dense(sampler.distribution(rows[i]), width)
            np.testing.assert_allclose(distribution.top, host.max(), rtol=1e-11)
            np.testing.assert_allclose(distribution.probability(token), host[token], rtol=1e-11, atol=1e-300)
            assert is_at(host, distribution.draw(u), u)
            np.testing.assert_allclose(dense(distribution, width), host, rtol=1e-11, atol=1e-300)
            weight = float(rng.uniform(0.3, 1))
            expected = residual(sampler.distribution(rows[i]), sampler.distribution(others[i]), weight)
            masses = residual(distribution, drafts[i], weight)
            np.testing.assert_allclose(masses.sum(), expected.sum(), rtol=1e-9, atol=1e-13)
            if expected.sum() > 1e-9:
                ids = sampler.distribution(rows[i]).token_ids
                drawn = normalised(distribution, masses).draw(u)
                assert is_at(expected, drawn if ids is None else int(ids.searchsorted(drawn)), u, 1e-6)


def test_certain_rows_are_cut_by_the_library_and_flat_ones_are_left_to_numpy():
    width = 50_000
    rng, source = np.random.default_rng(1), HostRows(width, 1)
    certain, flat = np.zeros((2, 1, width), np.float32)
    certain[0, :700] = 12 + rng.normal(size=700)
    flat += rng.normal(size=width)
    for given in ({}, {"top_p": 0.95}, {"min_p": 0.01}):
        sampler = Sampler(SamplingParams(temperature=1.0, **given), [1], width)
        for logits in (certain, flat):
            (row,) = source.collect([sampler.ask(0.5, width)], logits)
            distribution = sampler.make_row_distribution(row)
            assert row.is_cut == (bool(given) and logits is certain)
            assert isinstance(distribution, RowDistribution) == (logits is certain or not given)
            np.testing.assert_allclose(
                dense(distribution, width), dense(sampler.distribution(logits[0]), width), rtol=1e-11
            )
            if row.is_cut:
                assert 128 < np.count_nonzero(dense(distribution, width)) < MAX_CUT


@pytest.mark.parametrize("penalties", [{}, {"presence_penalty": 0.1}])
def test_rows_that_the_library_can_cut_are_never_taken_for_flat(penalties, monkeypatch):
    """Of a small vocabulary too, where a few hundred tokens are much of a row; tokens with log-probabilities too."""
    width, asked = 4096, []
    rng, source = np.random.default_rng(3), HostRows(width, 1)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.95, **penalties), [1], width)
    monkeypatch.setattr("specexport_runtime.sampling.sampler.truncated_softmax", asked.append)
    monkeypatch.setattr("specexport_runtime.sampling.device.truncated_softmax", asked.append)
    for i in range(12):
        logits = rng.normal(size=(1, width)).astype(np.float32)
        logits[0, :600] += 12
        ask = sampler.ask(0.5, width)
        (row,) = source.collect([ask._replace(rule=ask.rule._replace(fetch=True)) if i % 2 else ask], logits)
        assert 256 < np.count_nonzero(dense(sampler.make_row_distribution(row), width)) < MAX_CUT
    assert not asked


def test_a_row_that_is_looked_at_too_late_is_refused_and_a_kept_one_is_not():
    source, sampler = HostRows(9, 2), Sampler(SamplingParams(temperature=1.0), [1], 9)
    rows = np.arange(27, dtype=np.float32).reshape(3, 9)
    here = source.collect([sampler.ask(0.5, 9), sampler.ask(0.5, 9, slot=3)], rows[:2].copy())
    lost, kept = here[0], here[1]
    (last,) = source.collect([NOTHING], rows[2:])
    assert last.token_id == 8
    np.testing.assert_array_equal(kept.fetch(), rows[1])
    with pytest.raises(SpecexportError, match="overwritten by a later step"):
        lost.fetch()


def test_rows_of_a_cut_head_are_drawn_from_by_its_ids():
    ids, width = np.array([1, 4, 5, 9, 20], np.int32), 30
    rng, source, target = np.random.default_rng(2), HostRows(5, 1), HostRows(width, 1)
    assert not source.name(CutHead(ids[::-1], width)), "they would be drawn in another order"
    head = CutHead(ids, width)
    assert source.name(head)
    for given in ({}, {"top_p": 0.7}, {"top_k": 2}):
        sampler = Sampler(SamplingParams(temperature=0.8, **given), [1], width)
        logits, rows = rng.normal(size=(1, 5)).astype(np.float32), rng.normal(size=(1, width)).astype(np.float32)
        (row,) = source.collect([sampler.ask(0.6, width, slot=0)], logits)
        distribution, expected = sampler.make_row_distribution(row), sampler.distribution(head.widen(logits[0]))
        np.testing.assert_allclose(dense(distribution, width), dense(expected, width), rtol=1e-11)
        assert distribution.draw(0.6) == expected.draw(0.6)
        assert row.token_id == ids[logits[0].argmax()]
        np.testing.assert_array_equal(row.fetch(), head.widen(logits[0]))
        (asked,) = target.collect([sampler.ask(0.3, width, distribution.draw(0.6))], rows)
        found = residual(sampler.make_row_distribution(asked), distribution, 0.9)
        masses = residual(sampler.distribution(rows[0]), expected, 0.9)
        np.testing.assert_allclose(found.sum(), masses.sum(), rtol=1e-9)


def test_without_the_library_texts_are_numpys(monkeypatch):
    """Of targets, of drafts, of both and of none; with all that a request can ask for."""
    options = [
        {}, {"top_p": 0.8}, {"top_k": 4, "min_p": 0.05}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}},
        {"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 0.5},
    ]  # fmt: skip
    found = []
    for without in ("", "target", "draft", "both"):
        executors = {"target": make_target(), "draft": make_draft("good")}
        for name, executor in executors.items():
            assert executor.keeps_rows
            executor.keeps_rows = without not in (name, "both")
        requests = [
            make_sequence(i, [3, 1 + i % 4], SamplingParams(max_tokens=25, **{"temperature": 0.9} | each), seed=i)
            for i, each in enumerate(options * 2)
        ]
        finish(make_decoder(*executors.values(), 4), requests)
        found.append([(req.output, req.stats.accepted, req.logprobs, req.prompt_logprobs) for req in requests])
    assert found[1:] == found[:1] * 3
    monkeypatch.setattr("specexport_runtime.executors.host_rows.library", fail)
    assert not make_target().keeps_rows


def fail():
    raise SpecexportError("the library is missing.")
