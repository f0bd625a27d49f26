"""Where only a draft comes to, an error ends the draft: text and error of a sequence are those of plain decoding.

Errors are logits that are no numbers, of a draft or of its target, and places where nothing is possible.
"""

import numpy as np
import pytest

from specexport_runtime.drafters import draft_loop
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.drafter_kinds import KINDS as DRAFTERS
from tests.support.fakes.drafter_kinds import gated, self_decoder
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import VOCAB, finish, make_decoder, make_draft, make_sequence, make_target

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


def check_texts_are_plain(decoder, make, drafter, caplog):
    """Of the first nothing is drafted, and the log says why, once."""
    draft_loop._warn_of_nan.cache_clear()
    sequences, plain = make(), make()
    finish(decoder, sequences)
    finish(make_decoder(make_target(), None, 0), plain)
    assert [seq.output for seq in sequences] == [seq.output for seq in plain]
    assert [bool(seq.stats.drafted) for seq in sequences] == [False, True, True]
    (said,) = caplog.messages
    assert f"drafter {drafter}: " in said
    assert "specexport verify" in said


@pytest.mark.parametrize(
    ("kind", "value", "rows"),
    [*((kind, np.nan, 4) for kind in KINDS), ("sampled", np.inf, 4), ("penalties", np.inf, 4), ("greedy", np.nan, 1)],
)
def test_a_draft_model(kind, value, rows, caplog):
    """Infinite logits are no numbers either, where they are read."""
    draft = make_draft("good", rows)
    break_texts(draft, value)
    decoder = make_decoder(make_target(rows), draft, 4)
    check_texts_are_plain(decoder, lambda: make_sequences(**KINDS[kind]), "draft-model", caplog)


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_own_layers(kind, caplog):
    target = gated()
    break_texts(target, np.nan, when_masked=True)

    def make():
        sequences = make_sequences(**KINDS[kind])
        for seq in sequences:
            seq.layer_rules = LayerRules(threshold=None)
        return sequences

    check_texts_are_plain(self_decoder(target, 4), make, "self", caplog)


def test_it_does_not_matter_to_who_does_not_draft():
    target, draft = make_target(), make_draft("good")
    break_texts(draft, np.nan)
    [seq, *_] = make_sequences()
    finish(make_decoder(target, draft, 4, plan=()), [seq])
    check_plain(target, [seq])


class Special:
    """A grammar whose every third token is one of two: ``banned`` ones, or such that a draft does not have."""

    def __init__(self, *choices):
        self.choices, self.said = set(choices), []

    def mask(self, said):
        return self.choices if len(said) % 3 == 2 else set(range(VOCAB))

    def allowed(self, drafted):
        return np.isin(np.arange(VOCAB), list(self.mask([*self.said, *drafted])))

    def cut(self, drafted):
        said = self.said
        return next((i for i, x in enumerate(drafted) if x not in self.mask([*said, *drafted[:i]])), len(drafted))

    def forced(self, most, drafted=()):
        return []

    def consume(self, tokens):
        self.said += tokens


class TwoWays(Special):
    """Behind a free token A or B, after A nothing that is not banned, after B anything."""

    A, B, BANNED = 9, 4, (2, 3)

    def mask(self, said):
        if len(said) == 1:
            return {self.A, self.B}
        return set(self.BANNED) if len(said) == 2 and said[1] == self.A else set(range(VOCAB))


BANS = dict.fromkeys(TwoWays.BANNED, float("-inf"))


def outcome(decoder, *sequences):
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
    return [(tuple(seq.output), None if seq.error is None else str(seq.error)) for seq in sequences]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("grammar", [lambda: Special(12, 13), TwoWays], ids=["special", "dead end"])
def test_greedy_texts_and_errors_are_plain_decodings(name, grammar):
    kind, found = DRAFTERS[name], []
    for lookahead in (4, 0):
        decoder, _, drafter = kind.make(4, 0.4)
        decoder.plan = (DraftStage(kind.stage, lookahead),) if lookahead else ()
        drafter.vocab_size = 10  # fewer ids than the target
        params = SamplingParams(max_tokens=9, logit_bias=BANS if grammar is TwoWays else {})
        given = [make_sequence(i, [i, 4, 1], params, grammar=grammar(), forced_lookahead=8) for i in range(12)]
        found.append(outcome(decoder, *given))
        if grammar is TwoWays and kind.good is not None:
            assert len({error for _, error in found[-1]}) == 2
    assert [error for _, error in found[0]] == [error for _, error in found[1]]
    assert [text for text, error in found[0] if error is None] == [text for text, error in found[1] if error is None]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rows", [True, False])
def test_sampled_texts_go_on_with_what_their_draft_does_not_have(name, rows):
    decoder, target, drafter = DRAFTERS[name].make(4, 0.4)
    drafter.vocab_size = 10
    for each in (target, getattr(getattr(drafter, "runner", None), "executor", target)):
        each.keeps_rows = each.keeps_rows and rows
    params = SamplingParams(max_tokens=9, temperature=1.0)
    given = [make_sequence(i, [i, 4, 1], params, seed=i, grammar=Special(12, 13), forced_lookahead=8) for i in range(4)]
    assert {error for _, error in outcome(decoder, *given)} == {None}
