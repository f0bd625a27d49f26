"""Self-drafting within the whole loop: sampled text is exact, and requests that come and go leave nothing behind."""

from collections import Counter

import numpy as np
import pytest

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases import chance
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, finish, make_decoder, make_draft, make_sequence, run
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import LENGTH, SMALL, least_p_value, make_requests, small_model


def test_sampled_text_follows_the_targets_distribution():
    target = small_model(num_gates=8, gate_noise=1.5)
    runner = ModelRunner(target, max_chunk=2)
    decoder = Decoder(runner, ChainDrafter({"self": SelfDrafter(runner, vocab_size=SMALL)}))
    exits = DraftExitParams(gamma=0.4, target_acceptance=0.6, epsilon=0.3, beta1=0.2, beta2=0.2)
    requests = make_requests(
        800, SamplingParams(max_tokens=LENGTH + 1, temperature=0.9, frequency_penalty=0.4),
        draft_plan=(DraftStage("self", 4),), draft_exit=lambda i: DraftExit(exits),
        layer_rules=LayerRules(threshold=0.97, keep_last=1),
    )  # fmt: skip
    finish(decoder, requests)
    assert sum(seq.stats.accepted for seq in requests) > len(requests)
    assert sum(seq.stats.drafted - seq.stats.accepted for seq in requests) > 100
    assert len({seq.stats.layer_choice.mask.tobytes() for seq in requests}) > 1
    assert least_p_value(target, requests) > P_VALUE


ROWS, EVENTS = 5, 400
PLANS = (
    (DraftStage("self", 4),),
    (DraftStage("lookup", 5), DraftStage("self", 2)),
    (DraftStage("draft-model", 3),),
    (DraftStage("self", 8), DraftStage("draft-model", 2)),
    (),
)
RULES = (LayerRules(threshold=0.97), LayerRules(threshold=None, period=2), LayerRules(threshold=0.999, period=None))


@pytest.mark.fuzz
def test_requests_that_come_go_and_fail_give_what_they_give_alone():
    def make(index):
        draw = np.random.default_rng([chance.seed(3), index])
        prompt = draw.integers(0, VOCAB, draw.choice([draw.integers(1, 10), draw.integers(1, MAX_MODEL_LEN - 1)]))
        params = SamplingParams(max_tokens=int(draw.integers(1, 40)), temperature=float(draw.choice([0.0, 0.9])))
        plan, rules = PLANS[draw.integers(len(PLANS))], RULES[draw.integers(len(RULES))]
        exits = DraftExit(DraftExitParams(gamma=0.3)) if draw.random() < 0.5 else None
        options = {"draft_plan": plan, "layer_rules": rules, "draft_exit": exits}
        return make_sequence(index, prompt.tolist(), params, seed=index, **options)

    def decoder_of(rows, **options):
        target = FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 9, context=3, num_gates=12)
        decoder = make_decoder(target, make_draft("good", rows), 8, plan=(), **options)
        decoder.drafter.drafters["self"] = SelfDrafter(decoder.target, vocab_size=VOCAB)
        return decoder

    decoder, requests = decoder_of(ROWS, max_num_batched_tokens=20, max_chunk=9), []
    draw = np.random.default_rng(chance.seed(3))
    kinds = draw.choice(["submit", "cancel", "step", "fail"], chance.many(EVENTS), p=[0.14, 0.03, 0.82, 0.01])
    for kind in kinds:
        if kind == "submit":
            requests.append(make(len(requests)))
            decoder.add(requests[-1])
        elif kind == "cancel" and (live := [seq for seq in requests if seq.finish_reason is None]):
            decoder.cancel(live[draw.integers(len(live))])
        elif kind == "step":
            decoder.step()
        elif kind == "fail":
            decoder.fail(RuntimeError("engine"))
        decoder.check()
        assert decoder.target.executor._mask is None
    finish(decoder, [])
    for seq in requests:
        alone = make(seq.index)
        run(decoder_of(1), [alone])
        assert seq.output == (alone.output if seq.finish_reason == "length" else alone.output[: seq.num_generated])
        assert seq.stats.layer_choice in (None, alone.stats.layer_choice)
    ended = Counter(seq.finish_reason for seq in requests)
    assert ended.keys() == {"length", "cancelled", "error"}
    assert ended["length"] > len(requests) / 4
