"""A draft whose logits are no numbers: its sequence ends with an error that says so, and no other does."""

import numpy as np
import pytest

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.drafter_kinds import gated, self_decoder
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import finish, make_decoder, make_draft, make_sequence, make_target

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


def make_sequences(exits=False, **sampling):
    draft_exit = {"draft_exit": DraftExit(DraftExitParams(gamma=0.2))} if exits else {}
    params = SamplingParams(max_tokens=12, seed=7, **sampling)
    greedy = SamplingParams(max_tokens=12)
    return [
        make_sequence(0, [1, 2], params, **draft_exit),
        *(make_sequence(i, prompt, greedy) for i, prompt in enumerate(NEIGHBOURS, start=1)),
    ]


def check_only_the_first_ends(decoder, sequences, drafter):
    for seq in sequences:
        decoder.add(seq)
    finish(decoder, [])
    broken, *others = sequences
    assert [seq.finish_reason for seq in sequences] == ["error", "length", "length"]
    assert isinstance(broken.error, CheckFailedError)
    assert f"drafter {drafter}: " in broken.error.message
    assert "NaN" in broken.error.message
    assert "specexport verify" in broken.error.hint
    assert [seq.error for seq in others] == [None, None]
    check_plain(decoder.target.executor, others)


@pytest.mark.parametrize(
    ("kind", "value", "rows"),
    [*((kind, np.nan, 4) for kind in KINDS), ("sampled", np.inf, 4), ("penalties", np.inf, 4), ("greedy", np.nan, 1)],
)
def test_a_draft_model(kind, value, rows):
    """Infinite logits are no numbers either, where they are read; its row is free for the next."""
    draft = make_draft("good", rows)
    break_texts(draft, value)
    check_only_the_first_ends(make_decoder(make_target(rows), draft, 4), make_sequences(**KINDS[kind]), "draft-model")


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_own_layers(kind):
    target = gated()
    break_texts(target, np.nan, when_masked=True)
    sequences = make_sequences(**KINDS[kind])
    for seq in sequences:
        seq.layer_rules = LayerRules(threshold=None)
    check_only_the_first_ends(self_decoder(target, 4), sequences, "self")


def test_behind_a_copy_that_found_nothing():
    draft = make_draft("good")
    break_texts(draft, np.nan)
    plan = (DraftStage("lookup", 4), DraftStage("draft-model", 4))
    check_only_the_first_ends(make_decoder(make_target(), draft, 4, plan=plan), make_sequences(), "draft-model")


def test_it_does_not_matter_to_who_does_not_draft():
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.nan)
    [seq, *_] = make_sequences()
    finish(make_decoder(target, draft, 4, plan=()), [seq])
    check_plain(target, [seq])
