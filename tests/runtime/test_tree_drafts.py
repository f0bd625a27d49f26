"""Drafters whose requests may have trees, in the decoding loop: the same texts in fewer rounds, and the same laws."""

from collections import Counter

import pytest

from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes import drafter_kinds, forced, heads_on_fakes
from tests.support.fakes.drafter_kinds import KINDS, NOISES
from tests.support.fakes.forced import DECODERS, ROOM, Steps, plain_texts
from tests.support.fakes.heads_on_fakes import PROMPTS, check_plain
from tests.support.fakes.loop import finish, make_sequence, run
from tests.support.references.exact import P_VALUE, p_value
from tests.support.references.exact_texts import LENGTH, SMALL, exact


def decoded(name, tree_size, noise="good", lookahead=3, tokens=40, **options):
    """Rounds and events of greedy requests for all prompts."""
    decoder, target, _ = KINDS[name].make(lookahead, NOISES[noise])
    target.takes_trees = True
    params = SamplingParams(max_tokens=tokens, **options)
    requests = [
        make_sequence(i, prompt, params, draft_plan=decoder.plan, tree_size=tree_size)
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
    if KINDS[name].good is not None:
        assert any(event.path for event in events)
        assert rounds[1] < 0.95 * rounds[0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("noise", ["good", "random"])
def test_texts_with_penalties_are_plain_ones(name, noise):
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 1.5, 7: -100.0}}
    found = [[req.output for req in decoded(name, size, noise, tokens=24, **options)[0]] for size in (0, 11)]
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", DECODERS)
def test_texts_of_grammars_are_plain_ones(drafter):
    for lookahead, size in ((1, 4), (4, 9), (8, 12)):
        decoder = DECODERS[drafter](lookahead, NOISES["good"])
        decoder.target.executor.takes_trees = True
        requests = [
            make_sequence(
                i, prompt, SamplingParams(max_tokens=30), grammar=Steps(), forced_lookahead=ROOM, seed=i,
                draft_plan=decoder.plan, tree_size=size,
            )
            for i, prompt in enumerate(forced.PROMPTS)
        ]  # fmt: skip
        events = run(decoder, requests)
        plain = plain_texts(forced.PROMPTS, 30, drafter_kinds.make_target())
        assert [req.output for req in requests] == plain
        assert drafter in ("lookup", "self") or any(event.proposal.branches for event in events)


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("name", ["draft model", "medusa", "suffix"])
def test_sampled_texts_have_the_target_s_law(name, acceptance, monkeypatch):
    """Penalties make each node's law one of its own path."""
    for module in (drafter_kinds, heads_on_fakes):
        monkeypatch.setattr(module, "VOCAB", SMALL, raising=False)
    monkeypatch.setattr("tests.support.fakes.loop.VOCAB", SMALL)
    decoder, target, _ = KINDS[name].make(2, 0.8)
    target.takes_trees = True
    params = SamplingParams(max_tokens=LENGTH + 1, temperature=0.9, frequency_penalty=0.4)
    prompts = [[1], [4, 2, 4]] if name != "suffix" else [[1, 2, 1, 3, 1], [4, 2, 4, 1, 4]]
    requests = [
        Request(
            i, prompts[i % 2], params, vocab_size=SMALL, max_model_len=30, seed=i, acceptance=acceptance, scope="",
            draft_plan=(DraftStage(KINDS[name].stage, 2),), tree_size=6,
        )
        for i in range(1600)
    ]  # fmt: skip
    finish(decoder, requests)
    assert decoder.times.moved > 50
    for i, prompt in enumerate(prompts):
        counts = Counter(tuple(req.output[:LENGTH]) for req in requests[i::2])
        assert p_value(counts, exact(target, params, prompt)) > P_VALUE
