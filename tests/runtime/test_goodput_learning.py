"""The goodput controller with cost curves that are wrong, and with a drafter whose draft is one step."""

from dataclasses import replace

import pytest

from specexport_runtime.costs.learned import LearnedCosts, make_reading_key
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.at_once import ParallelCost
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.draft_cost import EngineCost, WeighedDrafter
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DrafterTraits, Proposal, StepLoad
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.goodput_fakes import (
    CAPACITY,
    LOOKAHEAD,
    curves,
    decode,
    make_sequences,
    model_decoder,
    step_cost,
)
from tests.support.fakes.loop import VOCAB, finish, goodput_length, greedy_reference, weighed


class Timed(Controller):
    """A controller whose rounds take what ``real`` says, whatever it was told."""

    def __init__(self, told, real, learned):
        known = {"draft-model": WeighedDrafter(ModelDrafter.traits, EngineCost(told.drafters["draft-model"]))}
        super().__init__(told, LOOKAHEAD, drafters=known, learned=learned)
        self.real = real

    def drafted(self, drafter, sequences, proposals, seconds):
        lengths = [len(proposal.tokens) for proposal in proposals]
        rows = [sum(length > depth for length in lengths) for depth in range(max(lengths))]
        seconds = sum(self.real.drafters[drafter].seconds(count, count) for count in rows)
        super().drafted(drafter, sequences, proposals, seconds)

    def record_verify_seconds(self, drafted, seconds):
        rows = self._round.load.num_rows
        super().record_verify_seconds(drafted, self.real.target.seconds(rows + drafted, rows))


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("told", "real", "count"),
    [
        (curves(0.05), curves(1.5), 1),  # drafting seems cheap and is dear: nothing should be drafted
        (curves(0.1, per_token=0.1), curves(0.1, per_token=0.9), 4),  # every token to verify costs a step
    ],
)
def test_wrong_curves_are_mended_while_a_batch_decodes(told, real, count):
    learned = LearnedCosts()
    best, mended, wrong = (
        decode("good", count, lengths=lengths, max_tokens=500, curve=real)[0]
        for lengths in (goodput_length(real, LOOKAHEAD), Timed(told, real, learned), goodput_length(told, LOOKAHEAD))
    )
    assert learned.version
    assert mended < 1.2 * best, learned.to_json()
    assert mended < wrong


def decoder_of_one(lengths, noise=0.0):
    return model_decoder(lengths, *(FakeExecutor(VOCAB, 1, CAPACITY, noise=each) for each in (0.0, noise)))


def test_a_draft_that_is_slow_to_read_is_left_alone_for_short_answers():
    """What catching up takes is learned apart from what a step takes."""

    class SlowReader(Timed):
        def drafted(self, drafter, sequences, proposals, seconds):
            reading = self._round.catching_up.get(drafter, 0.0)
            super().drafted(drafter, sequences, proposals, seconds)
            for name, (promised, steps, taken) in self._round.readings.items():
                self._round.readings[name] = promised, steps, taken + 50 * reading

    learned = LearnedCosts()
    decoder = decoder_of_one(SlowReader(curves(0.2), curves(0.2), learned))
    drafted = []
    for _ in range(8):
        (sequence,) = make_sequences(1, ["draft-model"], 12, prompt=300)
        finish(decoder, [sequence])
        drafted.append(sequence.stats.drafted)
    assert drafted[0] > 4
    assert max(drafted[-2:]) <= 1
    assert learned.draft_ratio(make_reading_key("draft-model"), 1) > 5
    assert learned.draft_ratio("draft-model", 1) == 1.0


def test_what_a_draft_reads_in_passing_tells_nothing_of_reading():
    """Behind a copy a draft model reads some tokens before its steps: what is left of their time is luck."""
    told, learned = curves(0.2), LearnedCosts()
    lengths = Controller(told, LOOKAHEAD, drafters=weighed(told), learned=learned)
    (sequence,) = make_sequences(1, ["draft-model"])
    sequence.tokens.append(1)
    for _ in range(40):
        lengths.begin_round(StepLoad(1, 1, 1, len(sequence.tokens)))
        count = lengths.allow("draft-model", [sequence], [LOOKAHEAD])[0].lookahead
        assert count
        proposal = Proposal([1] * count, None, "lookahead", "draft-model")
        lengths.drafted("draft-model", [sequence], [proposal], 1.3 * count * told.drafters["draft-model"].seconds(1, 1))
        sequence.tokens += [1] * (count + 1)
        lengths.observe(sequence, proposal, len(sequence.tokens) - count - 1, count, rejected=False)
        lengths.record_verify_seconds(count, told.target.seconds(1 + count, 1))
        sequence.tokens += [1] * 3  # a copy, of which it has read nothing
    assert 1.2 < learned.draft_ratio("draft-model", 1) < 1.4
    assert learned.draft_ratio(make_reading_key("draft-model"), 1) == learned.draft_ratio("draft-model", 1)


def test_what_is_learned_is_used_between_the_rounds_of_a_sampled_request_too():
    learned = LearnedCosts()
    decoder = decoder_of_one(Timed(curves(0.05), curves(1.5), learned), noise=0.4)
    (sampled,) = make_sequences(1, ["draft-model"], 300, params=SamplingParams(max_tokens=300, temperature=1.0, seed=7))
    finish(decoder, [sampled])
    assert learned.version


def test_a_drafter_that_promises_little_is_not_scouted_out():
    """Its steps cost as much as the target's: only probes try it, for a hundredth of the time."""
    learned = LearnedCosts()
    dear = curves(0.9)
    plain, _ = decode("wrong", 1, lengths=goodput_length(dear, LOOKAHEAD), names=(), max_tokens=100, curve=dear)
    tried, (sequence,) = decode("wrong", 1, lengths=Timed(dear, dear, learned), max_tokens=100, curve=dear)
    assert sequence.stats.drafted <= 2
    assert tried < 1.03 * plain


def test_what_was_seen_is_known_in_the_next_life():
    told = curves(0.2)
    kept = []
    learned = LearnedCosts(keep=kept.append)
    decode("good", 1, lengths=Timed(told, told, learned), max_tokens=300, curve=told)
    assert not learned.is_unknown("draft-model")
    learned.flush()  # as an engine that is closed does
    again = LearnedCosts(kept[-1])
    assert not again.is_unknown("draft-model")
    assert LearnedCosts().is_unknown("draft-model")


def test_a_draft_that_was_shortened_to_nothing_is_asked_for_again():
    """Where one token pays and no more, a shorter draft is none: that tells of costs, not of the drafter."""
    told, learned = replace(curves(0.2), has_logits=False), LearnedCosts()
    lengths = Timed(told, told, learned)
    (sequence,) = make_sequences(1, ["draft-model"])
    sequence.tokens.append(1)
    drafted = []
    for number in range(120):
        lengths.begin_round(StepLoad(1, 1, 1, 10))
        count = lengths.allow("draft-model", [sequence], [LOOKAHEAD])[0].lookahead
        drafted.append(count)
        tokens = [1] * count
        if tokens:  # two of three first tokens pass, and no other one
            accepted = min(number % 3, 1)
            proposal = Proposal(tokens, None, "lookahead", "draft-model")
            lengths.drafted("draft-model", [sequence], [proposal], 0.0)
            lengths.observe(
                sequence, proposal, len(sequence.tokens) - accepted - 1, accepted, rejected=accepted < len(tokens)
            )
        lengths.record_verify_seconds(len(tokens), 0.0)
    assert 1 < drafted.count(0) < 12
    assert drafted[40:] == [1] * 80


# ---- a drafter whose draft is one step ----


class FirstRight(Drafter):
    """Drafts all tokens in one step of an engine: the first is right, the others are not."""

    traits = DrafterTraits(default_lookahead=4, has_own_cache=True)

    def __init__(self, curve):
        self._curve, self.steps = curve, []

    def propose(self, sequences, lookaheads):
        return [self._draft(seq, most) for seq, most in zip(sequences, lookaheads, strict=True)]

    def _draft(self, seq, most):
        if not most or not seq.num_generated:
            return Proposal([], end="none")
        right = greedy_reference(FakeExecutor(VOCAB, 1, CAPACITY), seq.tokens, 2)
        self.steps.append(most)
        return Proposal([right[0], *[(right[1] + 1) % VOCAB] * (most - 1)], None, "lookahead", "own")

    def cost(self, curves):
        return ParallelCost(self._curve)


@pytest.mark.parametrize(("share", "pays"), [(0.3, True), (1.5, False)])
def test_a_step_that_drafts_all_tokens_is_paid_in_every_round(share, pays):
    """A token more a round is worth a plain step: a draft that costs less pays, and one that costs more never does."""
    curve = curves()
    own = FirstRight(step_cost(0.010 * share))
    lengths = goodput_length(curve, LOOKAHEAD, own=own)
    target = FakeExecutor(VOCAB, 1, CAPACITY)
    decoder = Decoder(ModelRunner(target), ChainDrafter({"own": own}, lengths), lengths=lengths)
    (seq,) = make_sequences(1, ["own"], 120)
    finish(decoder, [seq])
    seconds = sum(curve.target.seconds(call.num_tokens, 1) for call in target.calls)
    seconds += sum(own._curve.seconds(most, 1) for most in own.steps)
    plain = 120 * curve.target.seconds(1, 1)
    assert (seq.stats.draft_rounds > 40) == pays
    assert seconds < (0.8 if pays else 1.1) * plain
