"""A long random run: requests come, go, are cancelled and fail; every result equals what it gives alone."""

import numpy as np
import pytest

from specexport_runtime.executors.fake import ENTRY_BYTES
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases import chance
from tests.support.fakes import loop
from tests.support.fakes.drafter_kinds import PLANS

EVENTS = 1000
ROWS = 5
ROW_BYTES = 2 * loop.CAPACITY * ENTRY_BYTES
"""Of target and draft, at their full length."""


class World:
    def __init__(self, seed: int, reuse: bool = False, budget: float | None = None, **modes: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.beginnings = self.random.integers(0, loop.VOCAB, (3, loop.MAX_MODEL_LEN)).tolist() if reuse else []
        self.texts = []
        self.cached = 0
        self.modes = modes
        rows = ROWS if budget is None else 2 * ROWS
        self.limit = None if budget is None else int(budget * ROW_BYTES)
        self.most_running, self.longest_kept = 0, 0
        self.target, self.draft = loop.make_target(rows, context=3), loop.make_draft("good", rows)
        self.decoder = loop.make_decoder(
            self.target, self.draft, 4, max_num_seqs=rows - 2 if reuse else None, max_num_batched_tokens=20,
            max_chunk=9, reuses_prefixes=reuse, budget=self.limit, **modes,
        )  # fmt: skip
        self.live, self.ended = [], []
        self.count = 0

    def submit(self) -> None:
        length = int(self.random.integers(1, loop.MAX_MODEL_LEN - 1))
        prompt = self.random.integers(0, loop.VOCAB, length if self.random.random() < 0.3 else 1 + length % 9).tolist()
        if self.beginnings:
            known = [*self.beginnings, *self.texts[-9:]]
            begin = known[int(self.random.integers(len(known)))]
            prompt = [*begin[: int(self.random.integers(10, 50))], *prompt][: loop.MAX_MODEL_LEN - 2]
        temperature = float(self.random.choice([0.0, 0.0, 0.9]))
        params = SamplingParams(max_tokens=int(self.random.integers(1, 40)), temperature=temperature)
        plan = PLANS[self.random.choice(list(PLANS))]
        reference = self.random.integers(0, loop.VOCAB, int(self.random.integers(0, 30))).tolist()
        seq = loop.make_sequence(self.count, prompt, params, seed=self.count, draft_plan=plan, reference=reference)
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
        if self.limit is not None:
            self.settle_memory()
        done = [item for item in self.live if item[0].finish_reason is not None]
        self.live = [item for item in self.live if item[0].finish_reason is None]
        for seq, prompt, params, plan, reference in done:
            alone = loop.make_sequence(0, prompt, params, seed=seq.index, draft_plan=plan, reference=reference)
            loop.run(self.decoder_alone(), [alone])
            whole = alone.output
            assert seq.output == (whole if seq.finish_reason == "length" else whole[: seq.num_generated])
            self.ended.append(seq.finish_reason)
            self.texts.append(seq.tokens)
            self.cached += seq.stats.cached_tokens or 0

    def settle_memory(self) -> None:
        """What is resident is within the budget, by what the fakes really hold."""
        resident = self.target.resident_bytes + self.draft.resident_bytes
        load = self.decoder.load
        assert resident <= load.kv_bytes_resident <= self.limit
        assert load.kv_bytes_reserved <= self.limit
        assert (load.kv_bytes_reserved > 0) == (load.num_running > 0)
        self.most_running = max(self.most_running, load.num_running)
        self.longest_kept = max(self.longest_kept, load.num_prefixes)
        if not self.decoder.running and not self.longest_kept:
            assert resident <= self.limit / 8  # a spare, and no more

    def live_through(self, events: int) -> None:
        kinds = [self.submit, self.cancel, self.step, self.fail]
        for choice in self.random.choice(4, chance.many(events), p=[0.14, 0.03, 0.825, 0.005]):
            kinds[choice]()
            self.settle()
        while self.decoder.has_work:
            self.step()
            self.settle()
        assert not self.live
        assert len(self.ended) == self.count
        assert self.ended.count("length") > self.count / 4

    def decoder_alone(self):
        """The same models; only their caches are new."""
        target, draft = loop.make_target(1, context=3), loop.make_draft("good", 1)
        target._memo, draft._memo = self.target._memo, self.draft._memo
        return loop.make_decoder(target, draft, 4)


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("unpad_kv", "unpad_input", "reuse"), [(True, True, False), (False, False, False), (True, True, True)]
)
def test_random_events(unpad_kv, unpad_input, reuse):
    world = World(chance.seed(7), reuse=reuse, unpad_kv=unpad_kv, unpad_input=unpad_input)
    world.live_through(EVENTS if unpad_kv else EVENTS // 4)
    assert {"length", "cancelled", "error"} == set(world.ended)
    if reuse:
        counts = world.decoder.slots.counts
        assert counts.hits == world.cached
        assert counts.hits > counts.queries / 4
        assert counts.copied > counts.hits / 10


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize("reuse", [False, True])
def test_random_events_within_a_budget(reuse):
    """Memory of less than three rows for up to ten sequences: all end, in order, with what they give alone."""
    world = World(chance.seed(7), reuse=reuse, budget=2.5)
    begun = []
    admit = world.decoder.slots.admit
    world.decoder.slots.admit = lambda seq, row: (begun.append(seq.index), admit(seq, row))
    world.live_through(EVENTS if reuse else EVENTS // 4)
    assert begun == sorted(begun)  # nobody overtakes one that waits for memory
    assert world.most_running > 2
    if reuse:
        assert world.cached == world.decoder.slots.counts.hits > 0
        assert world.longest_kept > 2
