"""A sequence that is paused goes on with the same text, by the same rounds, whoever drafts and whatever is asked."""

import numpy as np
import pytest

from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases import chance
from tests.support.fakes import drafter_kinds
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, finish, make_decoder, make_draft, make_sequence, make_target

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 7, 11, 4, 5, 6]
OTHER = [7, 0, 7, 9, 9]


def on_models(plan):
    return lambda rows, **options: make_decoder(
        make_target(rows, context=3), make_draft("good", rows), 4, plan=drafter_kinds.PLANS[plan], **options
    )


DECODERS = {
    **{plan: on_models(plan) for plan in drafter_kinds.PLANS},
    "self": lambda rows, **options: drafter_kinds.self_decoder(drafter_kinds.gated(0.4, rows), 3, **options),
    "head": lambda rows, **options: drafter_kinds.head_decoder(4, 0.4, rows, **options)[0],
    "block head": lambda rows, **options: drafter_kinds.block_decoder(4, 0.4, rows, **options)[0],
    "medusa": lambda rows, **options: drafter_kinds.medusa_decoder(3, 0.4, rows, **options)[0],
    "hydra": lambda rows, **options: drafter_kinds.hydra_decoder(3, 0.4, rows, **options)[0],
    "assistant": lambda rows, **options: drafter_kinds.assistant_decoder(3, 0.4, rows, **options)[0],
}
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 9},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {3: 1.5}},
}


def interrupted(make, marks, way="greedy", *, rows=1, prompt=PROMPT, tokens=36, options=None, **decoding):
    """A sequence of one row, paused for a more urgent one each time that it has so many tokens."""
    decoder = make(rows, max_num_seqs=1, **decoding)
    params = SamplingParams(max_tokens=tokens, **WAYS[way])
    seq = make_sequence(0, prompt, params, seed=3, scope="", owner="a", **(options or {}))
    decoder.add(seq)
    marks = list(marks)
    while decoder.has_work:
        if marks and len(seq.tokens) >= marks[0]:
            del marks[0]
            decoder.add(make_sequence(1, OTHER, SamplingParams(max_tokens=2), priority=-1))
        decoder.step()
        decoder.check()
    assert seq.error is None
    assert not marks
    return seq, decoder


def result_of(seq):
    stats = seq.stats
    return (seq.output, seq.logprobs, seq.prompt_logprobs, stats.accepted_lengths, stats.drafted, stats.drafters)


@pytest.mark.parametrize(("way", "rows"), [*((way, 1) for way in WAYS), ("sampled", 3), ("logprobs", 3)])
@pytest.mark.parametrize("name", DECODERS)
def test_the_text_and_every_round_are_what_they_are_alone(name, way, rows):
    alone, _ = interrupted(DECODERS[name], [], way)
    seq, decoder = interrupted(DECODERS[name], [14, 31], way, rows=rows, reuses_prefixes=rows > 1)
    assert (alone.stats.preemptions, seq.stats.preemptions) == (0, 2)
    assert result_of(seq) == result_of(alone)
    assert seq.stats.num_prompt_tokens == len(PROMPT)
    assert seq.stats.cached_tokens == (0 if rows > 1 and way != "logprobs" else None)
    assert decoder.target.kv.num_committed == 0


@pytest.mark.parametrize("unpad_input", [True, False])
def test_the_padded_method_reads_again_too(unpad_input):
    for plan in drafter_kinds.PLANS:
        make = DECODERS[plan]
        alone, _ = interrupted(make, [], "sampled", unpad_kv=False, unpad_input=unpad_input)
        seq, _ = interrupted(make, [14, 31], "sampled", unpad_kv=False, unpad_input=unpad_input, max_chunk=5)
        assert seq.stats.preemptions == 2
        assert result_of(seq) == result_of(alone)


@pytest.mark.parametrize("name", ["draft-model", "head", "self"])
def test_a_prompt_may_be_paused_in_its_midst(name):
    """What was noted of its first half is noted again, and nothing twice."""
    options = {"layer_rules": LayerRules(threshold=0.5)} if name == "self" else {}
    alone, _ = interrupted(DECODERS[name], [], options=dict(options))
    decoder = DECODERS[name](1, max_num_seqs=1, max_chunk=4)
    seq = make_sequence(0, PROMPT, SamplingParams(max_tokens=36), **options)
    decoder.add(seq)
    for _ in range(2):
        decoder.step()
    assert decoder.target.kv.kv_len(seq.row) == 8
    finish(decoder, [make_sequence(1, OTHER, SamplingParams(max_tokens=1), priority=-1)])
    assert (seq.stats.preemptions, seq.num_read) == (1, 8)
    assert (seq.output, seq.stats.drafted) == (alone.output, alone.stats.drafted)
    if name == "self":
        assert seq.stats.layer_choice == alone.stats.layer_choice


def test_a_draft_exit_and_a_trace_go_on():
    def options():
        return {"draft_exit": DraftExit(DraftExitParams()), "trace": True}

    alone, _ = interrupted(DECODERS["draft-model"], [], "sampled", options=options())
    seq, _ = interrupted(DECODERS["draft-model"], [20], "sampled", options=options())
    assert result_of(seq) == result_of(alone)
    assert [each.emitted for each in seq.trace] == [each.emitted for each in alone.trace]
    assert [each.gamma for each in seq.trace] == [each.gamma for each in alone.trace]


def test_what_is_kept_is_not_read_again():
    counts = {}
    for reuse in (False, True):
        seq, decoder = interrupted(DECODERS["plain"], [30], rows=3, reuses_prefixes=reuse)
        shapes = decoder.target.executor.calls
        counts[reuse] = sum(shape.num_tokens for shape in shapes)
        assert seq.stats.preemptions == 1
    assert counts[False] - counts[True] == 29  # all but the newest token of the thirty


class Curious(Drafter):
    """A drafter of the user's own that reads features and knows nothing of pauses."""

    traits = HeadDrafter.traits

    def wants_features(self, sequence):
        return True

    def note_features(self, sequence, start, features):
        self.seen = [*getattr(self, "seen", []), start]

    def propose(self, sequences, lookaheads):
        from specexport_runtime.requests.records import Proposal

        return [Proposal([]) for _ in sequences]


def test_a_sequence_whose_drafter_cannot_go_on_is_not_paused():
    def make(rows, **options):
        decoder = make_decoder(make_target(rows, gives_features=True), None, 0, **options)
        decoder.drafter.drafters["own"] = Curious()
        decoder.plan = (DraftStage("own", 3),)
        return decoder

    seq, decoder = interrupted(make, [20])
    assert seq.stats.preemptions == 0
    assert not decoder.drafter.can_restart(seq)
    assert decoder.drafter.can_restart(
        make_sequence(0, [1], SamplingParams(), draft_plan=drafter_kinds.PLANS["lookup"])
    )


def test_an_engine_that_fails_leaves_the_paused_waiting():
    decoder = on_models("chained")(1, max_num_seqs=1)
    seq = make_sequence(0, PROMPT, SamplingParams(max_tokens=36))
    decoder.add(seq)
    while seq.num_generated < 10:
        decoder.step()
    urgent = make_sequence(1, OTHER, SamplingParams(max_tokens=20), priority=-1)
    decoder.add(urgent)
    decoder.step()
    decoder.fail(RuntimeError("the device went away"))
    assert (urgent.finish_reason, seq.finish_reason) == ("error", None)
    finish(decoder, [])
    assert seq.output == interrupted(on_models("chained"), [])[0].output


EVENTS, ROWS, OWNERS = 500, 4, ("a", "b", "c")


def exit_of(seq):
    return DraftExit(DraftExitParams(gamma=0.3)) if seq.index % 3 == 0 else None


class Crowd:
    """Owners that come and go, urgent requests, cancels: every text is that alone, and nobody waits for ever."""

    def __init__(self, seed, name, reuse):
        self.random = np.random.default_rng(seed)
        self.make = DECODERS[name]
        self.decoder = self.make(
            ROWS + 2 * reuse, max_num_seqs=ROWS, max_num_batched_tokens=24, max_chunk=9, reuses_prefixes=reuse
        )
        self.live, self.waits, self.count, self.paused, self.longest = [], {}, 0, 0, 0

    def submit(self):
        owner = OWNERS[int(self.random.choice(3, p=[0.7, 0.2, 0.1]))]
        prompt = self.random.integers(0, VOCAB, int(self.random.integers(1, 30))).tolist()
        params = SamplingParams(
            max_tokens=int(self.random.integers(1, 34)), temperature=float(self.random.choice([0.0, 0.9]))
        )
        priority = int(self.random.choice([0, 0, 0, 0, -1]))
        scope = [None, ""][int(self.random.integers(2))]
        named = {"seed": self.count, "scope": scope, "owner": owner, "priority": priority}
        seq = make_sequence(self.count, prompt, params, **named)
        seq.draft_exit = exit_of(seq)
        self.count += 1
        self.decoder.add(seq)
        self.live.append(seq)

    def cancel(self):
        if self.live:
            self.decoder.cancel(self.live[int(self.random.integers(len(self.live)))])

    def step(self):
        before = {id(seq): (len(seq.tokens), self.read(seq)) for seq in self.live}
        self.decoder.step()
        self.decoder.check()
        for seq in self.live:
            moved = (len(seq.tokens), self.read(seq)) != before[id(seq)]
            self.waits[seq.index] = 0 if moved else self.waits.get(seq.index, 0) + 1
            self.longest = max(self.longest, self.waits[seq.index])
        ended = [seq for seq in self.live if seq.finish_reason is not None]
        self.live = [seq for seq in self.live if seq.finish_reason is None]
        for seq in ended:
            self.paused += seq.stats.preemptions
            alone = make_sequence(0, seq.tokens[: seq.num_prompt_tokens], seq.params, seed=seq.index)
            alone.draft_exit = exit_of(seq)
            lone = self.make(1)
            lone.target.executor._memo = self.decoder.target.executor._memo  # the same model; only its cache is new
            finish(lone, [alone])
            assert seq.output == (alone.output if seq.finish_reason == "length" else alone.output[: seq.num_generated])

    def read(self, seq):
        return self.decoder.target.kv.kv_len(seq.row) if seq.row >= 0 else -1


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "reuse", "events"),
    [("draft-model", True, EVENTS), ("chained", False, EVENTS // 2), ("head", True, EVENTS), ("self", False, 250)],
)
def test_a_crowd(name, reuse, events):
    crowd = Crowd(chance.seed(5), name, reuse)
    for choice in crowd.random.choice(3, chance.many(events), p=[0.25, 0.02, 0.73]):
        [crowd.submit, crowd.cancel, crowd.step][choice]()
        if len(crowd.live) > 30:  # a server refuses more, too
            while len(crowd.live) > 10:
                crowd.step()
    while crowd.decoder.has_work:
        crowd.step()
    assert not crowd.live
    assert crowd.paused > crowd.count / 30
    assert crowd.longest < 30 * MAX_MODEL_LEN / ROWS  # thirty texts, four at a time
