"""Sampled rounds whose logits stay on the device give the host's texts, distributions and errors; little leaves it."""

from pathlib import Path

import numpy as np
import pytest

from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import EngineRequest
from specexport_runtime.executors.device_rows import RowSampler
from specexport_runtime.executors.row_kernels import NOTHING
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.accept import accept_sampled
from specexport_runtime.sampling.block import accept_block
from specexport_runtime.sampling.device import to_host
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler
from tests.support.fakes.cuda_sessions import open_cuda
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, make_decoder, make_draft, make_target, run
from tests.support.fakes.requests import request_of
from tests.support.fakes.trt_fakes import FakeGpu, make_entry, open_fake

ROWS, LOOKAHEAD = 4, 4
PARAMS = {
    "plain": {"temperature": 1.0},
    "cut": {"temperature": 0.7, "top_p": 0.9},
    "everything": {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.03},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    target = open_fake(folder, make_entry(LOOKAHEAD, ROWS), make_target(ROWS))[0]
    draft = open_fake(folder, make_entry(LOOKAHEAD, ROWS, draft=True), make_draft("good", ROWS))[0]
    return target, draft


def texts(executors, params, seeds, rule="block", plan=("draft-model", LOOKAHEAD), **options):
    requests = [
        request_of(
            i, [1 + seed % 3, 5], params, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, seed=seed,
            draft_plan=(DraftStage(*plan),), acceptance=rule, **options,
        )
        for i, seed in enumerate(seeds)
    ]  # fmt: skip
    run(make_decoder(*executors, LOOKAHEAD), requests)
    return requests


@pytest.mark.parametrize(("params", "rule"), [("plain", "token"), ("cut", "block"), ("everything", "block")])
def test_texts_are_the_hosts_and_nothing_is_fetched(pair, params, rule):
    given = SamplingParams(max_tokens=24, **PARAMS[params])
    before = [executor.rows.counts.fetches for executor in pair]
    found = texts(pair, given, range(30), rule)
    expected = texts((make_target(ROWS), make_draft("good", ROWS)), given, range(30), rule)
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output
        assert (one.stats.drafted, one.stats.accepted) == (other.stats.drafted, other.stats.accepted)
    assert sum(req.stats.accepted for req in found) > 0
    assert sum(req.stats.drafted - req.stats.accepted for req in found) > 0
    assert [executor.rows.counts.fetches for executor in pair] == before


@pytest.mark.parametrize("params", ["plain", "everything"])
def test_texts_of_ort_cuda_are_the_hosts(params, tmp_path, monkeypatch):
    """With one wait a step, and one for each residual of rows that lie on the device."""
    opened = [open_cuda(tmp_path, monkeypatch, model) for model in (make_target(ROWS), make_draft("good", ROWS))]
    given = SamplingParams(max_tokens=16, **PARAMS[params])
    found = texts([each.executor for each in opened], given, range(10))
    expected = texts((make_target(ROWS), make_draft("good", ROWS)), given, range(10))
    assert [req.output for req in found] == [req.output for req in expected]
    before = [(each.waits() - each.executor.rows.counts.waits, each.launches()) for each in opened]
    texts([each.executor for each in opened], given, range(10))  # all memory is there
    for each, (waits, launches) in zip(opened, before, strict=True):
        counts = each.executor.rows.counts
        assert counts.steps > 10
        assert counts.fetches == 0
        waited, launched = each.waits() - counts.waits - waits, each.launches() - launches
        if each is opened[1] and params == "plain":  # the draft's steps follow each other, and it waits once for them
            assert LOOKAHEAD * waited > launched > 2 * waited
        else:
            assert waited == launched
        each.executor.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.8}, {"logit_bias": {3: 2.0}}, {"logprobs": 2}, {"prompt_logprobs": 1},
        {"temperature": 0.0, "frequency_penalty": 0.5}, {"temperature": 0.0, "logprobs": 1},
    ],
)  # fmt: skip
def test_what_needs_whole_rows_gets_them_with_the_step(pair, changes):
    given = SamplingParams(max_tokens=9, **{"temperature": 1.0} | changes)
    waits = [executor.rows.counts.waits for executor in pair]
    found = texts(pair, given, range(6))
    expected = texts((make_target(ROWS), make_draft("good", ROWS)), given, range(6))
    assert [req.output for req in found] == [req.output for req in expected]
    assert [req.logprobs for req in found] == [req.logprobs for req in expected]
    # The step that ends a prompt with log-probabilities comes whole, and the draft's rows are fetched.
    if given.prompt_logprobs is None and (given.logprobs is None or given.temperature == 0):
        assert [executor.rows.counts.waits for executor in pair] == waits


def test_copies_are_tested_on_the_device(pair):
    given = SamplingParams(max_tokens=30, temperature=0.3)
    before = pair[0].rows.counts.fetches
    found = texts((pair[0], None), given, range(12), plan=("lookup", 3))
    expected = texts((make_target(ROWS), None), given, range(12), plan=("lookup", 3))
    assert [req.output for req in found] == [req.output for req in expected]
    assert sum(req.stats.drafted for req in found) > 20
    assert pair[0].rows.counts.fetches == before


@pytest.mark.parametrize("params", ["greedy", *PARAMS])
def test_drafts_with_siblings_are_the_hosts(pair, params):
    """Rows that a sibling is drawn from are fetched; a chain beside them stays on the device."""
    given, found = SamplingParams(max_tokens=24, **PARAMS.get(params, {})), []
    for executor in (pair[1], make_draft("good", ROWS)):
        drafter = ModelDrafter(ModelRunner(executor), vocab_size=VOCAB)
        requests = [
            request_of(
                i, [1 + i % 3, 5], given, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, seed=i,
                draft_plan=(DraftStage("draft-model", LOOKAHEAD),), tree_size=size,
            )
            for i, size in enumerate((12, 0, 7))
        ]  # fmt: skip
        for row, request in enumerate(requests):
            request.row = row
            request.commit([2])
        found.append(drafter.propose(requests, [LOOKAHEAD] * 3))
        for row in range(3):
            drafter.release_row(row)
    for one, other in zip(*found, strict=True):
        assert (one.tokens, one.end) == (other.tokens, other.end)
        assert [branch[:2] for branch in one.branches] == [branch[:2] for branch in other.branches]
    assert len(found[0][1].nodes) == 4 < len(found[0][2].nodes) <= 7
    assert 4 < len(found[0][0].nodes) <= 12


def test_a_row_that_is_no_distribution_ends_its_request_with_the_hosts_words(pair, monkeypatch):
    logits_after = type(make_target()).logits_after

    def broken(self, ids, *rest):
        row = logits_after(self, ids, *rest).copy()
        if len(ids) > 6:
            row[3] = np.nan
        return row

    monkeypatch.setattr(type(make_target()), "logits_after", broken)
    for params in PARAMS.values():
        given = SamplingParams(max_tokens=9, **params)
        errors = []
        for target in (pair[0], make_target(ROWS)):
            with pytest.raises(
                CheckFailedError, match=r"1 of 17 logits are NaN or \+inf \(first: token 3 is nan\)"
            ) as caught:
                texts((target, None), given, [1], plan=("lookup", 1))
            errors.append(caught.value)
        assert errors[0].message == errors[1].message


def test_a_draft_that_breaks_inside_its_chain_ends_there(tmp_path):
    class Broken(type(make_draft("good"))):
        def logits_after(self, ids, *rest):
            row = super().logits_after(ids, *rest).copy()
            if len(ids) == 9:
                row[3] = np.nan
            return row

    given, found = SamplingParams(max_tokens=30, temperature=1.0), []
    for on_device in (True, False):
        draft = Broken(VOCAB, ROWS, 96, seed=1)
        target = make_target(ROWS)
        if on_device:
            entry = make_entry(LOOKAHEAD, ROWS, draft=True)
            draft = open_fake(tmp_path, entry, draft)[0]
        found.append([(req.output, req.stats.drafted) for req in texts((target, draft), given, [1, 2])])
    assert found[0] == found[1]


WIDE = 151_936


class Device:
    """The steps of one engine, as few rows of random logits."""

    def __init__(self):
        self.gpu = FakeGpu(1 << 26)
        self.address = self.gpu.allocate(4 * 6 * WIDE, "logits")
        self.logits = self.gpu.array(self.address, (6, WIDE), "float32")
        self.sampler = RowSampler(self.gpu, WIDE, 1)

    def step(self, rows, asks):
        self.logits[: len(rows)] = rows
        self.sampler.put(asks, self.address)
        self.gpu.synchronize()
        return self.sampler.collect(asks, np.zeros(len(asks), np.int64))


def likely_logits(rng, count):
    """Rows about as certain as a language model: a few hundred tokens hold nine tenths, often far fewer."""
    ranks = rng.permuted(np.tile(np.arange(1, WIDE + 1), (count, 1)), axis=1)
    return (-rng.uniform(1.4, 2.2, (count, 1)) * np.log(ranks) + rng.normal(0, 0.3, (count, WIDE))).astype(np.float32)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.05}])
def test_few_bytes_and_one_wait_a_step(params):
    """Rounds of K=4 as the loop makes them; at a rejection of a plain draft there is one wait more."""
    rng, target, draft = np.random.default_rng(7), Device(), Device()
    sampler = Sampler(SamplingParams(temperature=1.0, **params), [1], WIDE)
    rounds = 4
    for seed in range(rounds):
        draws = RoundDraws(RandomStream(seed))
        q = likely_logits(rng, LOOKAHEAD + 1)
        tokens, distributions = [], []
        for j in range(LOOKAHEAD):
            row = q[j] + rng.normal(0, 0.4, WIDE).astype(np.float32)
            (asked,) = draft.step(row[None], [sampler.ask(draws.peek(j).draft, WIDE, slot=j)])
            distributions.append(sampler.make_row_distribution(asked))
            tokens.append(distributions[-1].draw(draws(j).draft))
        asks = [sampler.ask(draws.peek(j).resample, WIDE, token) for j, token in enumerate([*tokens, -1])]
        rows = target.step(q, asks)
        target_distributions = [sampler.make_row_distribution(row) for row in rows]
        found = [
            rule(tokens, distributions, target_distributions.__getitem__, draws)
            for rule in (accept_block, accept_sampled)
        ]
        host = [sampler.distribution(row) for row in q]
        numbers = [to_host(distribution) for distribution in distributions] if not seed else distributions
        if not seed:
            assert found == [rule(tokens, numbers, host.__getitem__, draws) for rule in (accept_block, accept_sampled)]
            draft.sampler.counts.__init__()
    left = target.sampler.counts.bytes + draft.sampler.counts.bytes
    assert left / rounds <= 20_000
    assert target.sampler.counts.fetches == draft.sampler.counts.fetches == 0
    assert target.gpu.calls["synchronize"] - target.sampler.counts.waits == rounds


def test_flat_rows_come_whole_after_a_few():
    """Candidates that are much of a row cost more than the row; the distribution is the same."""
    device, rng = Device(), np.random.default_rng(3)
    sampler, other = [Sampler(SamplingParams(temperature=1.0, top_p=0.9), [1], WIDE) for _ in range(2)]
    fetched = []
    for flat in (True,) * 10 + (False,) * 130:
        row = rng.normal(0, 0.1, (1, WIDE)).astype(np.float32) if flat else likely_logits(rng, 1) * 4
        (found,) = device.step(row, [sampler.ask(0.5, WIDE)])
        fetched.append(found.ask.rule.fetch)
        distribution, host = to_host(sampler.make_row_distribution(found)), other.distribution(row[0])
        np.testing.assert_array_equal(distribution.token_ids, host.token_ids)
        np.testing.assert_allclose(distribution.probs, host.probs, rtol=1e-9)
    assert fetched == [False] * 4 + [True] * 127 + [False] * 9


def test_rows_that_are_gone_are_not_read():
    device = Device()
    rows = likely_logits(np.random.default_rng(1), 2)
    sampler = Sampler(SamplingParams(temperature=1.0), [1], WIDE)
    old, kept = device.step(rows, [sampler.ask(0.5, WIDE), sampler.ask(0.5, WIDE, slot=0)])
    assert not old.found.token_probability
    device.step(rows[:1], [NOTHING])
    np.testing.assert_array_equal(kept.fetch(), rows[1])
    with pytest.raises(SpecexportError, match="overwritten by a later step"):
        old.fetch()
    with pytest.raises(SpecexportError, match="another uniform"):
        sampler.make_row_distribution(kept).residual(sampler.make_row_distribution(kept), 1.0).draw(0.25)


def test_rows_that_are_kept_beside_each_other_are_one_copy():
    device = Device()
    device.sampler = RowSampler(device.gpu, WIDE, 4)
    rows = likely_logits(np.random.default_rng(5), 6)
    sampler = Sampler(SamplingParams(temperature=1.0), [1], WIDE)
    before = device.gpu.calls["copy_rows"]
    kept = device.step(rows, [sampler.ask(0.5, WIDE, slot=slot) for slot in (0, 1, 2, -1, 6, 7)])
    assert device.gpu.calls["copy_rows"] - before == 2
    device.step(rows[:1], [NOTHING])
    for i in (0, 1, 2, 4, 5):
        np.testing.assert_array_equal(kept[i].fetch(), rows[i])


def test_memory_is_given_back_and_grows_with_the_steps():
    device = Device()
    sampler = Sampler(SamplingParams(temperature=1.0), [1], WIDE)
    device.step(likely_logits(np.random.default_rng(1), 1), [sampler.ask(0.5, WIDE, slot=3)])
    small = device.gpu.in_use
    device.sampler._allocate(300)
    assert device.gpu.in_use == small - 3  # what a step asks and finds, on both sides: allocated with the next one
    device.sampler.close()
    assert device.gpu.in_use == 1  # the logits


def request(executor, role):
    return EngineRequest(
        folder=Path(), entry=None, role=role, num_rows=executor.num_rows, kv_capacity=0, lookahead=LOOKAHEAD
    )


def test_rounds_find_all_memory_reserved(tmp_path):
    target, gpu, _ = open_fake(tmp_path, make_entry(LOOKAHEAD, ROWS), make_target(ROWS))
    draft, other, _ = open_fake(tmp_path, make_entry(LOOKAHEAD, ROWS, draft=True), make_draft("good", ROWS))
    target.reserve_rows(request(target, "target"))
    draft.reserve_rows(request(draft, "draft"))
    before = [each.calls["allocate"] for each in (gpu, other)]
    texts((target, draft), SamplingParams(max_tokens=20, temperature=1.0), range(8))
    assert target.rows.counts.steps > 5
    assert [each.calls["allocate"] for each in (gpu, other)] == before


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_gpu_without_the_memory_leaves_sampling_to_the_host(tmp_path, caplog, role):
    """``MIN_ROWS`` rows take two megabytes for candidates."""
    model = make_target(ROWS) if role == "target" else make_draft("good", ROWS)
    entry = make_entry(LOOKAHEAD, ROWS, draft=role == "draft")
    executor, gpu, _ = open_fake(tmp_path, entry, model, FakeGpu(1 << 20))
    before = gpu.in_use
    executor.reserve_rows(request(executor, role))
    assert not executor.keeps_rows
    assert gpu.in_use == before
    (line,) = caplog.messages
    assert line.startswith("tokens are drawn on the host: draws from logits wants")
    given = SamplingParams(max_tokens=9, temperature=1.0)
    pair = (executor, None) if role == "target" else (make_target(ROWS), executor)
    plan = ("lookup", 2) if role == "target" else ("draft-model", 2)
    other = (make_target(ROWS), None if role == "target" else make_draft("good", ROWS))
    (found,), (expected,) = (texts(each, given, [4], plan=plan) for each in (pair, other))
    assert found.output == expected.output
    executor.close()
    assert gpu.closed


def test_without_the_library_or_the_kernels_the_host_draws_and_says_so(tmp_path, caplog, monkeypatch):
    def missing():
        raise SpecexportError("_operators.so is missing")

    with monkeypatch.context() as patch:
        patch.setattr("specexport_runtime.executors.device_rows.library", missing)
        assert not open_fake(tmp_path, make_entry(LOOKAHEAD, ROWS), make_target(ROWS))[0].keeps_rows
    assert "tokens are drawn on the host: _operators.so is missing" in caplog.text

    class Old(FakeGpu):
        def load_kernel(self, ptx, name):
            raise SpecexportError("cuModuleLoadData failed on the GPU: 222")

    given = SamplingParams(max_tokens=9, temperature=1.0)
    executor = open_fake(tmp_path, make_entry(LOOKAHEAD, ROWS), make_target(ROWS), Old())[0]
    assert not executor.keeps_rows
    assert "tokens are drawn on the host: cuModuleLoadData" in caplog.text
    (found,), (expected,) = (
        texts((each, None), given, [4], plan=("lookup", 2)) for each in (executor, make_target(ROWS))
    )
    assert found.output == expected.output
