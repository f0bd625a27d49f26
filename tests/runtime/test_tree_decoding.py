"""Trees in the decoding loop: every path is read as a text of its own, and what stays of it is where it belongs."""

import numpy as np
import pytest

from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import Branch, Proposal
from tests.support.fakes.drafter_kinds import KINDS, NOISES
from tests.support.fakes.grown_trees import let_trees_grow
from tests.support.fakes.heads_on_fakes import check_plain, make_sequences, totals
from tests.support.fakes.loop import finish, make_decoder, make_draft, make_target, run


@pytest.mark.parametrize("noise", ["good", "random"])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_text_equals_plain_greedy(name, noise):
    """The fakes fail a step that reads a stale entry, and heads a feature of another token."""
    for lookahead in (1, 4):
        decoder, target, _ = KINDS[name].make(lookahead, NOISES[noise])
        let_trees_grow(decoder, target, most=1 + 2 * lookahead)
        sequences = make_sequences(lambda i: 5 + 7 * i)
        events = run(decoder, sequences)
        check_plain(target, sequences)
        tested, paths = sum(event.drafted for event in events), [event.path for event in events if event.path]
        assert tested > sum(len(event.proposal.tokens) for event in events), "there were branches"
        if lookahead > 1 and KINDS[name].good is not None:
            assert paths, "some of them stayed"
        assert sum(event.accepted for event in events) == totals(sequences)[1]
        assert all(len(event.tokens) in (event.accepted, event.accepted + 1) for event in events)
        assert decoder.times.moved >= len([path for path in paths if len(path) > 1])


@pytest.mark.parametrize("name", ["draft model", "head", "assistant", "block head", "medusa", "hydra"])
def test_every_draft_is_of_the_text_alone(name):
    """Behind a path that left the chain too: what a drafter has read of the chain beyond that is forgotten."""
    kind = KINDS[name]
    decoder, target, drafter = kind.make(3, NOISES["good"])
    let_trees_grow(decoder, target, right=1.0)
    model, drafted = drafter.runner.executor, 0
    events = []
    inner = decoder.drafter.propose

    def propose(requests, lookaheads):
        nonlocal drafted
        found = inner(requests, lookaheads)
        for req, proposal in zip(requests, found, strict=True):
            text = list(req.tokens)
            if name == "medusa":  # its heads know the feature before the newest token, and nothing else
                text[-1:] = [model.logits_after(text[:-1]).argmax()]
            for token in proposal.tokens:
                assert token == model.logits_after(text).argmax()
                text.append(token)
                drafted += 1
        return found

    decoder.drafter.propose = propose
    sequences = make_sequences(lambda i: 30 + 4 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    assert drafted > 60
    assert sum(event.path is not None for event in events) > 20


def test_branches_take_no_more_room_than_the_cache_row_has():
    decoder, target, _ = KINDS["draft model"].make(4, NOISES["good"])
    let_trees_grow(decoder, target, most=60)
    sequences = make_sequences(lambda _: 60)
    run(decoder, sequences)
    check_plain(target, sequences)


def test_branches_take_no_more_memory_than_their_request_was_given():
    target = make_target()
    decoder = make_decoder(target, make_draft("good"), 4, budget=12_288)
    let_trees_grow(decoder, target, most=60)
    sequences = make_sequences(lambda _: 20)
    finish(decoder, sequences)  # it checks what is reserved
    check_plain(target, sequences)
    assert sum(seq.stats.drafted for seq in sequences) > 4 * sum(seq.stats.draft_rounds for seq in sequences)


def test_a_tree_for_a_target_that_takes_none_ends_its_request_alone():
    decoder = make_decoder(make_target(), make_draft("same"), 2)
    drafter = decoder.drafter.drafters["draft-model"]
    propose = drafter.propose

    def branching(requests, lookaheads):
        found = propose(requests, lookaheads)
        return [
            each._replace(branches=(Branch(0, -1),)) if req.index == 0 else each
            for req, each in zip(requests, found, strict=True)
        ]

    drafter.propose = branching
    sequences = make_sequences(lambda _: 9)[:2]
    with pytest.raises(SpecexportError, match="no trees"):
        run(decoder, sequences)
    assert len(sequences[1].output) == 9


def test_places_of_a_draft():
    proposal = Proposal([5, 6], branches=(Branch(7, -1), Branch(8, 2), Branch(9, 0)))
    assert proposal.nodes == [5, 6, 7, 8, 9]
    assert proposal.parents == [-1, 0, -1, 2, 0]
    assert [proposal.path_to(place) for place in range(-1, 5)] == [[], [0], [0, 1], [2], [2, 3], [0, 4]]


def test_entries_of_a_path_come_one_behind_the_other():
    runner = ModelRunner(make_target())
    executor = runner.executor
    runner.kv.write(1, [9])
    executor._cache[1, :9] = 10 + np.arange(9)
    assert runner.keep_path(1, 4, [0, 1, 4]) == 1
    assert executor._cache[1, :7].tolist() == [10, 11, 12, 13, 14, 15, 18]
    assert runner.kv.kv_len(1) == 7
    runner.kv.write(1, [2])
    assert runner.keep_path(1, 7, [0, 1]) == 0
    assert runner.kv.kv_len(1) == 9
