"""A draft whose logits are no numbers: its sequence ends with an error that says so, and no other does."""

import numpy as np
import pytest

from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import VOCAB, greedy_reference, make_decoder, make_draft, make_sequence, make_target

NEIGHBOURS = ([5], [6])
KINDS = {
    "greedy": {},
    "greedy with exit": {"exits": True},
    "penalties": {"repetition_penalty": 1.2},
    "sampled": {"temperature": 0.8},
}


def break_texts(executor, value, *, when_masked=False):
    """Spoil the logits of texts that begin with 1: of those with layers off only, if that is asked."""
    right = executor.logits_after

    def spoiled(tokens, mask=None):
        logits = right(tokens, mask)
        if tokens[0] != 1 or (when_masked and mask is None):
            return logits
        return np.where(np.arange(len(logits)) == 3, np.float32(value), logits)

    executor.logits_after = spoiled


def run_all(decoder, sequences):
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
        decoder.check()


def make_sequences(exits=False, **sampling):
    draft_exit = {"draft_exit": DraftExit(DraftExitParams(gamma=0.2))} if exits else {}
    params = SamplingParams(max_tokens=12, seed=7, **sampling)
    greedy = SamplingParams(max_tokens=12)
    return [
        make_sequence(0, [1, 2], params, **draft_exit),
        *(make_sequence(i, prompt, greedy) for i, prompt in enumerate(NEIGHBOURS, start=1)),
    ]


def check_only_the_first_ended(target, sequences, drafter):
    broken, *others = sequences
    assert [seq.finish_reason for seq in sequences] == ["error", "length", "length"]
    assert isinstance(broken.error, CheckFailedError)
    assert f"drafter {drafter}: " in broken.error.message
    assert "NaN" in broken.error.message
    assert "specexport verify" in broken.error.hint
    for seq in others:
        assert seq.error is None
        assert seq.output == greedy_reference(target, seq.tokens[: seq.num_prompt_tokens], 12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model(kind):
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.nan)
    sequences = make_sequences(**KINDS[kind])
    run_all(make_decoder(target, draft, 4), sequences)
    check_only_the_first_ended(target, sequences, "draft-model")


@pytest.mark.parametrize("kind", ["sampled", "penalties"])
def test_infinite_logits_are_no_numbers_either_where_they_are_read(kind):
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.inf)
    sequences = make_sequences(**KINDS[kind])
    run_all(make_decoder(target, draft, 4), sequences)
    check_only_the_first_ended(target, sequences, "draft-model")


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_own_layers(kind):
    target = make_target(num_gates=12, gate_noise=0.4)
    break_texts(target, np.nan, when_masked=True)
    decoder = make_decoder(target, None, 0)
    decoder.drafter.drafters["self"] = SelfDrafter(decoder.target, vocab_size=VOCAB)
    decoder.plan = (DraftStage("self", 4),)
    sequences = make_sequences(**KINDS[kind])
    for seq in sequences:
        seq.layer_rules = LayerRules(threshold=None)
    run_all(decoder, sequences)
    check_only_the_first_ended(target, sequences, "self")


def test_behind_a_copy_that_found_nothing():
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.nan)
    sequences = make_sequences()
    plan = (DraftStage("lookup", 4), DraftStage("draft-model", 4))
    run_all(make_decoder(target, draft, 4, plan=plan), sequences)
    check_only_the_first_ended(target, sequences, "draft-model")


def test_it_does_not_matter_to_who_does_not_draft():
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.nan)
    [seq, *_] = make_sequences()
    decoder = make_decoder(target, draft, 4, plan=())
    run_all(decoder, [seq])
    assert seq.finish_reason == "length"
    assert seq.output == greedy_reference(target, [1, 2], 12)


def test_the_row_is_free_for_the_next():
    target, draft = make_target(rows=1), make_draft("good", rows=1)
    break_texts(draft, np.nan)
    sequences = make_sequences()
    run_all(make_decoder(target, draft, 4), sequences)
    check_only_the_first_ended(target, sequences, "draft-model")
