"""A long random run: requests come, go, are cancelled and fail; every result equals what it gives alone."""

import chance
import numpy as np
import pytest
from loop import MAX_MODEL_LEN, VOCAB, make_decoder, make_draft, make_sequence, make_target, run
from test_modes import PLANS

from specexport_runtime.sampling.params import SamplingParams

EVENTS = 2000
ROWS = 5


class World:
    """A decoder, what was asked of it, and what each request gives alone."""

    def __init__(self, seed: int, reuse: bool = False, **modes: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.beginnings = self.random.integers(0, VOCAB, (3, MAX_MODEL_LEN)).tolist() if reuse else []
        self.texts = []
        self.cached = 0
        self.modes = modes
        self.target, self.draft = make_target(ROWS, context=3), make_draft("good", ROWS)
        self.decoder = make_decoder(
            self.target,
            self.draft,
            4,
            max_num_seqs=ROWS - 2 if reuse else None,
            max_num_batched_tokens=20,
            max_chunk=9,
            reuses_prefixes=reuse,
            **modes,
        )
        self.live, self.ended = [], []
        self.count = 0

    def submit(self) -> None:
        length = int(self.random.integers(1, MAX_MODEL_LEN - 1))
        prompt = self.random.integers(0, VOCAB, length if self.random.random() < 0.3 else 1 + length % 9).tolist()
        if self.beginnings:
            known = [*self.beginnings, *self.texts[-9:]]
            begin = known[int(self.random.integers(len(known)))]
            prompt = [*begin[: int(self.random.integers(10, 50))], *prompt][: MAX_MODEL_LEN - 2]
        temperature = float(self.random.choice([0.0, 0.0, 0.9]))
        params = SamplingParams(max_tokens=int(self.random.integers(1, 40)), temperature=temperature)
        plan = PLANS[self.random.choice(list(PLANS))]
        reference = self.random.integers(0, VOCAB, int(self.random.integers(0, 30))).tolist()
        seq = make_sequence(self.count, prompt, params, seed=self.count, draft_plan=plan, reference=reference)
        seq.scope = self.random.choice(["", "other"], p=[0.9, 0.1]) if self.beginnings else None
        self.count += 1
        self.decoder.add(seq)
        self.live.append((seq, prompt, params, plan, reference))

    def cancel(self) -> None:
        if self.live:
            self.decoder.cancel(self.live[int(self.random.integers(len(self.live)))][0])

    def step(self) -> None:
        self.decoder.step()

    def fail(self) -> None:
        self.decoder.fail(RuntimeError("engine"))

    def settle(self) -> None:
        """Check the invariants, and compare what has ended with what it gives alone."""
        self.decoder.check()
        self.decoder.draft_model.runner.kv.check()
        done = [item for item in self.live if item[0].finish_reason is not None]
        self.live = [item for item in self.live if item[0].finish_reason is None]
        for seq, prompt, params, plan, reference in done:
            alone = make_sequence(0, prompt, params, seed=seq.index, draft_plan=plan, reference=reference)
            run(make_decoder(self.target_alone(), make_draft("good", 1), 4), [alone])
            whole = alone.output
            assert seq.output == (whole if seq.finish_reason == "length" else whole[: seq.num_generated])
            self.ended.append(seq.finish_reason)
            self.texts.append(seq.tokens)
            self.cached += seq.stats.cached_tokens or 0

    def target_alone(self):
        fresh = make_target(1, context=3)
        fresh._memo = self.target._memo  # the same model; only its cache is new
        return fresh


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("unpad_kv", "unpad_input", "reuse"), [(True, True, False), (False, False, False), (True, True, True)]
)
def test_random_events(unpad_kv, unpad_input, reuse):
    world = World(chance.seed(7), reuse=reuse, unpad_kv=unpad_kv, unpad_input=unpad_input)
    kinds = [world.submit, world.cancel, world.step, world.fail]
    events = EVENTS if unpad_kv else EVENTS // 4
    for choice in world.random.choice(4, chance.many(events), p=[0.14, 0.03, 0.825, 0.005]):
        kinds[choice]()
        world.settle()
    while world.decoder.has_work:
        world.step()
        world.settle()
    assert not world.live
    assert len(world.ended) == world.count
    assert {"length", "cancelled", "error"} == set(world.ended)
    assert world.ended.count("length") > world.count / 4
    if reuse:
        counts = world.decoder.prefixes.counts
        assert counts.hits == world.cached
        assert counts.hits > counts.queries / 4
        assert counts.copied > counts.hits / 10
