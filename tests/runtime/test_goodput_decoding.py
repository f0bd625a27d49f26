"""The goodput controller in whole texts, in modelled time: the worst case, plain spells, copies or a model."""

import random
from dataclasses import replace

import pytest

from specexport_runtime.drafters.suffix import SuffixDrafter
from specexport_runtime.drafters.suffix_store import SuffixStore
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.lookahead.acceptance import Confidence, make_shared_confidence, match_slots
from specexport_runtime.lookahead.rules import StepTimes, allocate
from specexport_runtime.requests.records import Asked, Promise, Proposal, StepLoad
from specexport_runtime.sampling.distribution import one_hot
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.goodput_fakes import CAPACITY, LOOKAHEAD, curves, decode, make_sequences, model_decoder
from tests.support.fakes.loop import VOCAB, finish, goodput_length, greedy_reference


@pytest.mark.parametrize("count", [1, 8])
def test_a_draft_that_is_never_right_costs_at_most_three_percent(count):
    lengths = goodput_length(curves(), LOOKAHEAD)
    plain, expected = decode("wrong", count, lengths=None, names=(), max_tokens=110)
    seconds, sequences = decode("wrong", count, lengths=lengths, max_tokens=110)
    assert [seq.output for seq in sequences] == [seq.output for seq in expected]
    assert seconds <= plain / 0.97


@pytest.mark.parametrize(("kind", "count", "least"), [("perfect", 1, 2.0), ("perfect", 8, 1.8), ("good", 1, 1.3)])
def test_a_draft_that_is_often_right_pays(kind, count, least):
    lengths = goodput_length(curves(), LOOKAHEAD)
    plain, expected = decode(kind, count, lengths=None, names=(), max_tokens=110)
    seconds, sequences = decode(kind, count, lengths=lengths, max_tokens=110)
    assert [seq.output for seq in sequences] == [seq.output for seq in expected]
    assert plain / seconds > least


def test_lookup_learns_from_copies_that_it_did_not_test():
    """A copy costs nothing to make: while none is tested, whether it would have passed is still seen."""
    lengths = goodput_length(curves(per_token=0.9), LOOKAHEAD)
    _, (seq,) = decode("good", 1, lengths=lengths, names=("lookup",), curve=curves(per_token=0.9), max_tokens=400)
    memory = lengths._drafters["lookup/False/block"]
    assert sum(memory.shared.tests) > seq.stats.draft_rounds


def test_what_promises_less_than_the_error_of_the_times_is_not_drafted() -> None:
    flat = StepTimes([1.0, 1.0, 1.0], None, ())
    assert allocate([[0.015, 0.001]], [0.0], 1.0, flat)[0] == [2], "times that say drafting is free"
    assert allocate([[0.015, 0.001]], [0.0], 1.0, flat, 0.02)[0] == [0]
    assert allocate([[0.03, 0.001]], [0.0], 1.0, flat, 0.02)[0] == [2]
    assert allocate([[0.015], [0.015]], [0.0, 0.0], 2.0, flat, 0.02)[0] == [0, 0]
    assert allocate([[0.5], [0.0]], [0.0, 0.0], 2.0, flat, 0.02)[0][0] == 1


def offered(length, model_rate, draft=0.3, distributions=None, **options):
    """A controller that knows both drafters, its sequence, and how much of a copy it allows."""
    lengths = goodput_length(curves(draft), LOOKAHEAD)
    (seq,) = make_sequences(1, ("suffix", "draft-model"), **options)
    seq.tokens.append(1)
    lengths.begin_round(StepLoad(1, 1, 1, len(seq.tokens)))
    copies, model = lengths._memory("suffix", seq).acceptance, lengths._memory("draft-model", seq).acceptance
    slots = match_slots(LOOKAHEAD)
    for _ in range(60):  # long matches foretell what comes, short ones rarely
        copies.observe(slots[12:20], 8, rejected=False)
        copies.observe(slots[2:3], 0, rejected=True)
        model.observe(range(LOOKAHEAD), int(model_rate * LOOKAHEAD), rejected=model_rate < 1)
    proposal = Proposal([1] * 8, distributions, match_length=length, drafter="suffix")
    (allowed,) = lengths.cut("suffix", [seq], [proposal], [8])
    return lengths, seq, allowed.lookahead


def test_of_a_draft_that_was_drawn_nothing_is_left_out():
    """How long it is may be a matter of what was drawn."""
    assert offered(2, model_rate=1.0)[2] == 0
    assert offered(2, model_rate=1.0, distributions=[one_hot(1)] * 8)[2] == 8


@pytest.mark.parametrize("length", [2, 12])
def test_a_trace_tells_what_every_way_promised(length):
    lengths, seq, copied = offered(length, model_rate=1.0, trace=True)
    stage = lengths._memory("draft-model", seq)
    stage.read = len(seq.tokens) - 1  # nothing to catch up on
    asked = [Asked("suffix", copied, "goodput")]
    if not copied:
        (allowed,) = lengths.allow("draft-model", [seq], [8])
        asked.append(Asked("draft-model", allowed.lookahead, "goodput"))
    plain, copy, model = promises = lengths.promises(seq, asked)
    curve = curves()
    entries = len(seq.tokens)
    draft = curve.drafters["draft-model"].seconds(1, 1, entries)
    assert plain == Promise("", 0, 1.0, pytest.approx(1 / curve.target.seconds(1, 1, entries)))
    for each, seconds in ((copy, 0.0), (model, draft)):
        whole = curve.target.seconds(1 + each.lookahead, 1, entries) + each.lookahead * seconds
        assert each.tokens_per_second == pytest.approx(each.expected / whole)
    reached = stage.acceptance.reach(range(model.lookahead))
    assert model.expected == pytest.approx(1 + sum(reached))
    best = max(promises, key=lambda each: each.tokens_per_second)
    assert best.drafter == ("suffix" if copied else "draft-model")
    assert best.lookahead == asked[-1].lookahead
    assert lengths.promises(seq, asked) == promises  # nothing is remembered of it


def test_promises_are_for_traces_and_make_no_memories():
    (seq,) = make_sequences(1, ("suffix", "draft-model"), trace=True)
    lengths = goodput_length(curves(), LOOKAHEAD)
    seq.tokens.append(1)
    lengths.begin_round(StepLoad(1, 1, 1, len(seq.tokens)))
    assert [each.drafter for each in lengths.promises(seq, [])] == [""]
    assert not lengths._stages
    assert not lengths._drafters
    _, (one,) = decode("good", 1, lengths=goodput_length(curves(), LOOKAHEAD), max_tokens=40)
    assert all(record.promised[0].drafter == "" for record in one.trace)
    assert all(record.taken.lookahead >= len(record.drafted) for record in one.trace[1:])
    _, (fixed,) = decode("good", 1, lengths=None, max_tokens=20, adaptive=False)
    assert not any(record.promised for record in fixed.trace)


@pytest.mark.parametrize(
    ("length", "model_rate", "draft", "copied"),
    [(12, 1.0, 0.3, 8), (2, 1.0, 0.3, 0), (12, 0.0, 0.3, 8), (5, 1.0, 0.001, 0), (12, 0.5, 0.001, 8)],
)
def test_a_long_copy_beats_the_model_and_a_short_one_does_not(length, model_rate, draft, copied):
    """Nor one of some length, if the model costs next to nothing."""
    assert offered(length, model_rate, draft)[2] == copied


def test_auto_decodes_as_the_better_of_both_and_stays_exact():
    target = FakeExecutor(VOCAB, 1, CAPACITY, context=3)
    draft = FakeExecutor(VOCAB, 1, CAPACITY, context=3, noise=0.4)

    def rounds(*names):
        decoder = model_decoder(goodput_length(curves(), LOOKAHEAD), target, draft)
        decoder.drafter.drafters["suffix"] = SuffixDrafter(SuffixStore(4096))
        (seq,) = make_sequences(1, names, trace=True)
        finish(decoder, [seq])
        return seq

    both, copied, drafted = rounds("suffix", "draft-model"), rounds("suffix"), rounds("draft-model")
    assert {record.drafter for record in both.trace if record.drafted} == {"suffix", "draft-model"}
    assert both.output == copied.output == drafted.output
    assert both.stats.rounds <= 1.1 * min(copied.stats.rounds, drafted.stats.rounds)


def test_what_passes_is_drafted_further_and_what_fails_is_not():
    sure, chance = Confidence(make_shared_confidence()), random.Random(0)
    for _ in range(200):  # a token of 0.99 always passes here, and one of 0.6 in two of ten
        sure.begin(())
        top = chance.choice((0.99, 0.6))
        assert not sure.should_end(top), "nothing has to be reached"
        passed = top == 0.99 or chance.random() < 0.2
        sure.observe(int(passed), rejected=not passed)
    sure.begin([0.5] * 10)
    assert not any(sure.should_end(0.99) for _ in range(8))
    assert sure.should_end(0.6)
    sure.begin([0.1] * 10)
    assert not sure.should_end(0.6), "a step that costs little is worth a small chance"


def test_the_last_token_of_a_whole_draft_was_not_asked_for_and_tells_nothing():
    shared = make_shared_confidence()
    sure = Confidence(shared)
    before = list(shared.tests)
    sure.begin(())
    sure.should_end(0.99)
    sure.observe(1, rejected=True)  # the second of two tokens failed
    assert sum(shared.tests) == pytest.approx(sum(before) - 0.01 * 2 + 1)
    assert shared.failure_rates[8] < 0.1


def decoded_alone(params=None, *, has_logits=True, **options):
    lengths = goodput_length(replace(curves(0.3), has_logits=has_logits), LOOKAHEAD)
    target, draft = FakeExecutor(VOCAB, 1, CAPACITY), FakeExecutor(VOCAB, 1, CAPACITY, noise=0.4)
    (sequence,) = make_sequences(1, ["draft-model"], 300, params=params, trace=True, **options)
    finish(model_decoder(lengths, target, draft), [sequence])
    return sequence


def test_drafts_that_end_early_are_accepted_more_often_and_the_text_is_the_same():
    ending, whole = decoded_alone(), decoded_alone(has_logits=False)
    prompt, output = ending.tokens[:6], ending.tokens[6:]
    assert output == whole.tokens[6:] == greedy_reference(FakeExecutor(VOCAB, 1, CAPACITY), prompt, 300)
    rates = [seq.stats.accepted / seq.stats.drafted for seq in (ending, whole)]
    assert rates[0] > 1.1 * rates[1]
    assert ending.stats.draft_exits > 10
    assert not whole.stats.draft_exits


@pytest.mark.parametrize(
    "options",
    [{"params": SamplingParams(max_tokens=300, temperature=1.0, seed=3)}, {"adaptive": False}],
    ids=["sampled", "fixed"],
)
def test_drafts_whose_draws_are_still_to_be_used_or_whose_length_is_fixed_do_not_end(options):
    assert not decoded_alone(**options).stats.draft_exits
