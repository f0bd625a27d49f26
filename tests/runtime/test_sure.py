"""Drafts that end where they are no longer sure enough: of greedy texts, by what was tested."""

import random
from dataclasses import replace

import pytest

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.lookahead.acceptance import Sureness, shared_sureness
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.goodput_fakes import CAPACITY, LOOKAHEAD, curves, make_sequences, model_decoder
from tests.support.fakes.loop import VOCAB, finish, goodput_length, greedy_reference


def test_what_passes_is_drafted_further_and_what_fails_is_not():
    sure, chance = Sureness(shared_sureness()), random.Random(0)
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
    shared = shared_sureness()
    sure = Sureness(shared)
    before = list(shared.tests)
    sure.begin(())
    sure.should_end(0.99)
    sure.observe(1, rejected=True)  # the second of two tokens failed
    assert sum(shared.tests) == pytest.approx(sum(before) - 0.01 * 2 + 1)
    assert shared.failure_rates[8] < 0.1


def decode(params=None, *, has_logits=True, **options):
    lengths = goodput_length(replace(curves(0.3), has_logits=has_logits), LOOKAHEAD)
    target, draft = FakeExecutor(VOCAB, 1, CAPACITY), FakeExecutor(VOCAB, 1, CAPACITY, noise=0.4)
    (sequence,) = make_sequences(1, ["draft-model"], 300, params=params, trace=True, **options)
    finish(model_decoder(lengths, target, draft), [sequence])
    return sequence


def test_drafts_that_end_early_are_accepted_more_often_and_the_text_is_the_same():
    ending, whole = decode(), decode(has_logits=False)
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
    assert not decode(**options).stats.draft_exits
