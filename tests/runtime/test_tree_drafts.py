"""Drafters whose requests may have trees, in the decoding loop: the same texts and distributions, in fewer rounds."""

import pytest

from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes import drafter_kinds, forced, heads_on_fakes, loop
from tests.support.fakes.drafter_kinds import KINDS, NOISES
from tests.support.fakes.forced import DECODERS, plain_texts, sequences_with
from tests.support.fakes.heads_on_fakes import PROMPTS, check_plain
from tests.support.fakes.loop import finish, make_sequence, run
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import LENGTH, SMALL, least_p_value, make_requests


def decoded(name, tree_size):
    decoder, target, _ = KINDS[name].make(3, NOISES["good"])
    target.takes_trees = True
    requests = [
        make_sequence(i, prompt, SamplingParams(max_tokens=40), draft_plan=decoder.plan, tree_size=tree_size)
        for i, prompt in enumerate(PROMPTS)
    ]
    events = run(decoder, requests)
    return requests, events, target


@pytest.mark.parametrize("name", KINDS)
def test_texts_are_plain_ones_in_fewer_rounds(name):
    rounds = []
    for size in (0, 16):
        requests, events, target = decoded(name, size)
        check_plain(target, requests)
        rounds.append(sum(req.stats.rounds for req in requests))
        if not size or KINDS[name].good is not None:  # copies of a text that repeats itself have none
            assert any(event.proposal.branches for event in events) == bool(size)
        assert all(len(event.proposal.nodes) <= max(size, 3) for event in events)
        deep = any(branch.parent >= 3 for event in events for branch in event.proposal.branches)
        assert deep == (size > 0) or name not in (
            "medusa",
            "block head",
        )  # drafts in one step have branches of branches
    if KINDS[name].good is not None:
        assert any(event.path for event in events)
        assert rounds[1] < 0.95 * rounds[0]


@pytest.mark.parametrize("drafter", DECODERS)
def test_texts_of_grammars_are_plain_ones(drafter):
    for lookahead, size in ((1, 4), (4, 9)):
        decoder = DECODERS[drafter](lookahead, NOISES["good"])
        decoder.target.executor.takes_trees = True
        params = SamplingParams(max_tokens=30)
        requests = sequences_with(lambda _, params=params: params, draft_plan=decoder.plan, tree_size=size)
        events = run(decoder, requests)
        plain = plain_texts(forced.PROMPTS, 30, drafter_kinds.make_target())
        assert [req.output for req in requests] == plain
        assert drafter in ("lookup", "self") or any(event.proposal.branches for event in events)


@pytest.mark.parametrize(("name", "acceptance"), [("draft model", "token"), ("medusa", "block"), ("suffix", "block")])
def test_sampled_texts_have_the_target_s_distribution(name, acceptance, monkeypatch):
    """Penalties make each node's distribution one of its own path."""
    for module in (drafter_kinds, heads_on_fakes, loop):
        monkeypatch.setattr(module, "VOCAB", SMALL)
    decoder, target, _ = KINDS[name].make(2, 0.8)
    target.takes_trees = True
    params = SamplingParams(max_tokens=LENGTH + 1, temperature=0.9, frequency_penalty=0.4)
    prompts = [[1], [4, 2, 4]] if name != "suffix" else [[1, 2, 1, 3, 1], [4, 2, 4, 1, 4]]
    requests = make_requests(
        1000, params, prompts=prompts, acceptance=acceptance, scope="", tree_size=6,
        draft_plan=(DraftStage(KINDS[name].stage, 2),),
    )  # fmt: skip
    finish(decoder, requests)
    assert decoder.times.moved > 30
    assert least_p_value(target, requests) > P_VALUE
