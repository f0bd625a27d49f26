"""Log-probabilities of prompts: those of the checkpoint itself, however the prompt is cut, whoever else is there."""

import math

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.decoding import schedule
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.logprobs import compute_logprobs
from tests.support.fakes.loop import VOCAB, finish, make_decoder, make_draft, make_sequence, make_target, run
from tests.support.fakes.rounds import opened

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 5


def reference(target, tokens):
    """Log-probability of each token but the first, by the definition."""
    rows = [target.logits_after(tokens[:i]).astype(np.float64) for i in range(1, len(tokens))]
    return [row[token] - np.log(np.exp(row).sum()) for row, token in zip(rows, tokens[1:], strict=True)]


@pytest.mark.parametrize("budget", [8, 20, 512])
def test_scores_are_the_same_however_a_prompt_is_cut(budget):
    target = make_target(4, context=3)
    decoder = make_decoder(target, make_draft("good"), 4, max_num_batched_tokens=budget, reuses_prefixes=True)
    prompts = [(np.arange(30) * step % VOCAB).tolist() for step in (3, 5, 7)]
    scored = [0, 2]
    sequences = [
        make_sequence(i, ids, SamplingParams(max_tokens=6, prompt_logprobs=2 if i in scored else None), scope="")
        for i, ids in enumerate([*prompts, prompts[0]])
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MAX_SCORED", 9)
        run(decoder, sequences)
    for i, seq in enumerate(sequences):
        if i not in scored:
            assert seq.prompt_logprobs is None
            continue
        first, *rest = seq.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in rest] == prompts[i][1:]
        assert [entry.logprob for entry in rest] == pytest.approx(reference(target, prompts[i]), abs=1e-6)
        assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.logprob for entry in rest)
    again = make_sequence(9, prompts[0], SamplingParams(max_tokens=2, prompt_logprobs=0), scope="")
    run(decoder, [again])
    assert again.stats.cached_tokens is None  # what is scored is read
    assert len(again.prompt_logprobs) == 30


def test_no_more_is_scored_at_a_time_than_there_should_be():
    scored = [1, 2, 3]
    assert schedule.bound_scored({0: 40, 1: 40, 2: 40, 3: 40}, scored) == {0: 40, 1: 40, 2: 24}
    assert schedule.bound_scored({1: 64, 2: 40, 0: 7}, scored) == {1: 64, 0: 7}


def test_a_prompt_that_cannot_be_scored_ends_alone(monkeypatch):
    decoder = make_decoder(make_target(4), None, 0)
    good, bad = (make_sequence(i, [1, 2, 3], SamplingParams(max_tokens=4, prompt_logprobs=1)) for i in range(2))

    def note(seq, start, logits):
        if seq is bad:
            raise InvalidRequestError("no.")
        seq.prompt_logprobs += compute_logprobs(seq.tokens[start + 1 : 3], logits, 0)

    monkeypatch.setattr("specexport_runtime.decoding.verify.note_scores", note)
    for seq in (good, bad):
        decoder.add(seq)
    finish(decoder, [])
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert bad.output == []


def test_scores_are_those_of_the_checkpoint(demo_bundle, demo_pair):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    with opened(demo_bundle, 2, adaptive=True) as engine:
        ids = engine.encode(TEXT)
        assert len(ids) > 2 * schedule.MAX_SCORED
        params = [SamplingParams(max_tokens=4, prompt_logprobs=1), SamplingParams(max_tokens=4)]
        result, plain = engine.generate([ids, ids], params)
        assert result.token_ids == plain.token_ids
    model = AutoModelForCausalLM.from_pretrained(demo_pair / "target", dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    wanted = wanted[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    found = [entry.logprob for entry in result.prompt_logprobs[1:]]
    assert found == pytest.approx(wanted, abs=1e-3)
    assert math.fsum(found) == pytest.approx(math.fsum(wanted), abs=1e-2)
