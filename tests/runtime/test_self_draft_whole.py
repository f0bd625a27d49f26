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


ROWS = 5
PLANS = (
    (DraftStage("self", 4),),
    (DraftStage("lookup", 5), DraftStage("self", 2)),
    (DraftStage("draft-model", 3),),
    (DraftStage("self", 8), DraftStage("draft-model", 2)),
    (),
)
RULES = (LayerRules(threshold=0.97), LayerRules(threshold=None, period=2), LayerRules(threshold=0.999, period=None))


class World:
    """A decoder with every drafter, and requests of all kinds."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.target = self.new_target()
        self.decoder = self.new_decoder(self.target, make_draft("good", ROWS), max_num_batched_tokens=20, max_chunk=9)
        self.live, self.count, self.ended = [], 0, Counter()

    def new_target(self, rows=ROWS):
        return FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 9, context=3, num_gates=12)

    def new_decoder(self, target, draft, **options):
        decoder = make_decoder(target, draft, 8, plan=(), **options)
        decoder.drafter.drafters["self"] = SelfDrafter(decoder.target, vocab_size=VOCAB)
        return decoder

    def submit(self):
        length = int(self.random.integers(1, MAX_MODEL_LEN - 1))
        prompt = self.random.integers(0, VOCAB, length if self.random.random() < 0.3 else 1 + length % 9).tolist()
        temperature = float(self.random.choice([0.0, 0.9]))
        params = SamplingParams(max_tokens=int(self.random.integers(1, 40)), temperature=temperature)
        plan, rules = PLANS[self.random.integers(len(PLANS))], RULES[self.random.integers(len(RULES))]
        exits = DraftExitParams(gamma=0.3) if self.random.random() < 0.5 else None
        self.live.append(
            (self.make(self.count, prompt, params, plan, rules, exits), prompt, params, plan, rules, exits)
        )
        self.count += 1
        self.decoder.add(self.live[-1][0])

    def make(self, index, prompt, params, plan, rules, exits):
        draft_exit = None if exits is None else DraftExit(exits)
        options = {"draft_plan": plan, "layer_rules": rules, "draft_exit": draft_exit}
        return make_sequence(index, prompt, params, seed=index, **options)

    def cancel(self):
        if self.live:
            self.decoder.cancel(self.live[int(self.random.integers(len(self.live)))][0])

    def step(self):
        self.decoder.step()

    def fail(self):
        self.decoder.fail(RuntimeError("engine"))

    def settle(self):
        """Check the invariants, and compare what has ended with what it gives alone."""
        self.decoder.check()
        assert self.target._mask is None
        for seq, *made in [item for item in self.live if item[0].finish_reason is not None]:
            fresh = self.new_target(1)
            fresh._memo = self.target._memo  # the same model; only its cache is new
            alone = self.make(seq.index, *made)
            run(self.new_decoder(fresh, make_draft("good", 1)), [alone])
            whole = alone.output
            assert seq.output == (whole if seq.finish_reason == "length" else whole[: seq.num_generated])
            assert seq.stats.layer_choice in (None, alone.stats.layer_choice)
            self.ended[seq.finish_reason] += 1
        self.live = [item for item in self.live if item[0].finish_reason is None]


@pytest.mark.fuzz
def test_requests_that_come_go_and_fail_give_what_they_give_alone():
    world = World(chance.seed(3))
    kinds = [world.submit, world.cancel, world.step, world.fail]
    for choice in world.random.choice(4, chance.many(400), p=[0.14, 0.03, 0.82, 0.01]):
        kinds[choice]()
        world.settle()
    while world.decoder.has_work:
        world.step()
        world.settle()
    assert world.ended.keys() == {"length", "cancelled", "error"}
    assert world.ended.total() == world.count
    assert world.ended["length"] > world.count / 4
