"""Log-probabilities of tokens: the target's own, whoever drafted, however the token was chosen."""

import itertools
import json
import math

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.sampling.logprobs import compute_logprobs
from tests.support.fakes.drafter_kinds import PLANS
from tests.support.fakes.engine import WORDS, make_engine
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run

WAYS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "logit_bias": {3: 2.0, 4: -math.inf}},
    "sampled": {"temperature": 0.8, "seed": 5},
    "sampled, cut": {"temperature": 1.2, "top_k": 5, "presence_penalty": 0.7, "seed": 6},
}


def independent(target, prompt, tokens, count):
    """By the definition, from the logits after each prefix: softmax in float64, the whole vocabulary sorted."""
    entries = []
    for j, token in enumerate(tokens):
        logits = target.logits_after([*prompt, *tokens[:j]]).astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum())
        ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
        entries.append((token, log_probs[token], [(i, log_probs[i]) for i in ids]))
    return entries


def assert_close(entries, wanted):
    assert len(entries) == len(wanted)
    for entry, (token, logprob, top) in zip(entries, wanted, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(logprob, abs=1e-5)
        assert [i for i, _ in entry.top] == [i for i, _ in top]
        assert [p for _, p in entry.top] == pytest.approx([p for _, p in top], abs=1e-5)


@pytest.mark.parametrize(
    ("way", "plan"),
    [*((way, "chained") for way in WAYS), *(("sampled, cut", plan) for plan in ("plain", "draft-model", "lookup"))],
)
def test_they_are_those_of_the_targets_raw_logits_whoever_drafted(way, plan):
    prompts = [[1, 2], [3, 4, 5, 3, 4], [6]]
    params = SamplingParams(max_tokens=25, logprobs=4, **WAYS[way])
    sequences = [make_sequence(i, prompt, params, seed=i, draft_plan=PLANS[plan]) for i, prompt in enumerate(prompts)]
    decoder = make_decoder(make_target(), make_draft("good"), 4, plan=())
    run(decoder, sequences)
    if plan in ("draft-model", "chained"):
        accepted, drafted = (sum(getattr(seq.stats, name) for seq in sequences) for name in ("accepted", "drafted"))
        assert 0 < accepted < drafted
    for seq, prompt in zip(sequences, prompts, strict=True):
        assert_close(seq.logprobs, independent(make_target(), prompt, seq.output, 4))


def test_a_draft_out_of_the_target_itself_leaves_no_trace_in_them():
    """The executor is the same one, with layers switched off a moment before."""
    target = FakeExecutor(VOCAB, 4, 80, num_gates=8)
    engine = engine_of(target, make_engine().tokenizer, max_model_len=64)
    params = SamplingParams(max_tokens=40, logprobs=3)
    handle = engine.submit([1, 2], params, drafter="self", num_speculative_tokens=3)
    result = handle.result(30)
    assert result.stats.drafted > 0
    assert any(mask is not None and not all(mask) for mask in target.masks)
    assert_close(result.logprobs, independent(target, [1, 2], result.token_ids, 3))


def test_there_are_as_many_as_tokens_when_a_stop_string_cuts_the_round():
    engine = make_engine("same")
    full = engine.generate([1, 2], SamplingParams(max_tokens=30), num_speculative_tokens=8)[0]
    stop = " ".join(WORDS[i] for i in full.token_ids[4:6])
    params = SamplingParams(max_tokens=30, stop=stop, logprobs=1)
    result = engine.generate([1, 2], params, num_speculative_tokens=8)[0]
    assert result.finish_reason == "stop"
    assert len(result.token_ids) < 30
    assert result.stats.accepted_lengths[-1] < 9  # the round had more
    assert_close(result.logprobs, independent(make_target(), [1, 2], result.token_ids, 1))
    pieces = [p for chunk in engine.stream([1, 2], params, num_speculative_tokens=8) for p in chunk.pieces]
    assert [piece.logprobs for piece in pieces] == result.logprobs


def test_who_does_not_ask_gets_none_and_needs_no_logits_in_a_batch_too():
    engine = make_engine()
    wants = []
    execute = engine.target.execute
    engine.target.execute = lambda want="logits": (wants.append(want), execute(want))[1]
    assert engine.generate([1, 2], SamplingParams(max_tokens=10))[0].logprobs is None
    assert {p.logprobs for chunk in engine.stream([1, 2], SamplingParams(max_tokens=9)) for p in chunk.pieces} == {None}
    assert set(wants) == {"token_ids"}
    asks = [None, 0, 5, None, 20]
    results = engine.generate([[i] for i in range(5)], [SamplingParams(max_tokens=12, logprobs=n) for n in asks])
    assert "logits" in wants
    for i, (result, count) in enumerate(zip(results, asks, strict=True)):
        if count is None:
            assert result.logprobs is None
        else:
            assert_close(result.logprobs, independent(make_target(), [i], result.token_ids, min(count, VOCAB)))


def test_ties_go_to_the_lower_id_at_the_border_too():
    row = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], np.float32)
    for count, wanted in enumerate([[], [1], [1, 3], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5], [1, 3, 2, 4, 5, 0]]):
        (entry,) = compute_logprobs([0], row[None], count)
        assert [i for i, _ in entry.top] == wanted
    (entry,) = compute_logprobs([0], row[None], 20)
    assert len(entry.top) == 6
    assert [i for i, _ in compute_logprobs([7], np.zeros((1, 1000), np.float32), 3)[0].top] == [0, 1, 2]
    for seed in range(5):
        many = np.random.default_rng(seed).integers(0, 99, 700).astype(np.float32)
        wanted = sorted(range(700), key=lambda i: (-many[i], i))[:20]
        assert [i for i, _ in compute_logprobs([7], many[None], 20)[0].top] == wanted
        ranks = [entry.rank for entry in compute_logprobs(wanted, np.broadcast_to(many, (20, 700)), 0)]
        assert ranks == list(range(1, 21))


def test_large_logits_and_a_large_vocabulary_lose_no_precision():
    random = np.random.default_rng(0)
    for shift, scale in itertools.product([0.0, 5000.0, -5000.0], [0.1, 8.0]):
        row = (shift + scale * random.normal(0, 1, 262_144)).astype(np.float32)
        exact = row.astype(np.float64)
        exact -= exact.max()
        exact -= math.log(math.fsum(np.exp(exact).tolist()))
        (entry,) = compute_logprobs([123], row[None], 20)
        assert entry.logprob == pytest.approx(exact[123], abs=1e-6 * max(1.0, abs(exact[123])))
        assert entry.rank == 1 + int((row > row[123]).sum())
        assert [i for i, _ in entry.top] == np.argsort(-exact, kind="stable")[:20].tolist()


def test_banned_tokens_and_broken_logits():
    row = np.array([[0.0, -math.inf, 0.0]], np.float32)
    (entry,) = compute_logprobs([1], row, 3)
    assert entry.logprob == -math.inf
    assert entry.top[2] == (1, -math.inf)
    for bad in (math.nan, math.inf):
        with pytest.raises(CheckFailedError):
            compute_logprobs([0], np.array([[0.0, bad]], np.float32), 1)


def test_broken_logits_end_that_request_alone():
    engine = make_engine()
    engine.target.logits_after([1, 2])[3] = float("inf")
    with pytest.raises(CheckFailedError):
        engine.submit([1, 2], SamplingParams(max_tokens=9, logprobs=1)).result(30)
    assert len(engine.generate([3], SamplingParams(max_tokens=9, logprobs=1))[0].logprobs) == 9
    engine.check()


def test_generate_prints_them_in_json_and_refuses_them_in_text(demo_bundle, capsys):
    from specexport_runtime.cli.command import runtime_cli

    arguments = ["generate", str(demo_bundle), "def f", "--max-tokens", "4", "--threads", "1", "--no-spin"]
    with pytest.raises(InvalidRequestError, match="add --json"):
        runtime_cli.main([*arguments, "--logprobs", "2"], standalone_mode=False)
    runtime_cli.main([*arguments, "--logprobs", "2", "--json"], standalone_mode=False)
    record = json.loads(capsys.readouterr().out)
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in record["logprobs"])
