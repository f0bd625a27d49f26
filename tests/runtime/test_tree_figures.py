"""What is told of trees: counts of branches, traces of paths, and pieces that say which tokens stood beside a chain."""

import json

import pytest

from specexport_runtime.cli.output import print_chunk
from specexport_runtime.requests.records import Branch, Proposal, RoundTrace, Share
from specexport_runtime.requests.request import RoundEvent
from specexport_runtime.requests.results import StreamChunk, StreamPiece, make_chunk
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.telemetry.counts import EngineCounts
from specexport_runtime.telemetry.never_accepted import NeverAccepted
from specexport_runtime.telemetry.observers import RoundRecord
from tests.support.fakes.drafter_kinds import KINDS, NOISES
from tests.support.fakes.grown_trees import let_trees_grow
from tests.support.fakes.loop import make_sequence, run

TREE = Proposal([5, 6, 7], branches=(Branch(8, -1), Branch(9, 0), Branch(4, 4)), drafter="head")


def trace_of(accepted, path=None, *, tree=TREE, emitted=(), **values):
    return RoundTrace(
        round=3, num_rows=1, num_tokens=7, prompt_tokens=0, asked=(), drafter=tree.drafter, drafted=tuple(tree.tokens),
        accepted=accepted, end="lookahead", emitted=emitted, gamma=None, milliseconds=2.0, plain_milliseconds=None,
        branches=tuple(branch[:2] for branch in tree.branches), path=path, **values,
    )  # fmt: skip


@pytest.fixture(scope="module")
def decoded():
    """Some texts of drafts with branches: what each round did, and the sequences with their traces."""
    decoder, target, _ = KINDS["draft model"].make(3, NOISES["good"])
    let_trees_grow(decoder, target)
    prompts = [[3], [1, 2, 3], [7, 0, 7]]
    sequences = [make_sequence(i, each, SamplingParams(max_tokens=40), trace=True) for i, each in enumerate(prompts)]
    events = run(decoder, sequences)
    assert any(event.path for event in events)
    return decoder, sequences, events


def test_branches_are_counted_apart(decoded):
    _, sequences, events = decoded
    for seq in sequences:
        own = [event for event in events if event.request is seq]
        assert seq.stats.branches == sum(len(event.proposal.branches) for event in own) > 0
        assert seq.stats.accepted_branches == sum(event.accepted - event.on_chain for event in own)
        data = seq.stats.to_json()
        assert data["acceptance_rate"] == data["accepted"] / data["drafted"]
        assert data["drafted"] == data["branches"] + sum(len(event.proposal.tokens) for event in own)
        assert data["drafters"]["draft-model"]["accepted_branches"] == data["accepted_branches"]
    assert sum(seq.stats.accepted_branches for seq in sequences) > 0


def test_an_engine_s_counts_are_those_of_its_requests(decoded):
    decoder, sequences, events = decoded
    counts = EngineCounts()
    counts.set_limits(100, 3)
    counts.add_round(RoundRecord(events, 0, 1.0), 1.0)
    drafts = counts.all_drafts
    for name in ("drafted", "accepted", "branches", "accepted_branches"):
        assert getattr(drafts, name) == sum(getattr(seq.stats, name) for seq in sequences)
    assert sum(counts.accepted_at.values()) == drafts.accepted  # each once, at its depth
    assert decoder.times.moved > 0
    assert 0 < decoder.times.move < decoder.times.accept


def test_a_trace_tells_the_path(decoded):
    _, sequences, events = decoded
    for seq in sequences:
        own = [event for event in events if event.request is seq]
        for event, each in zip(own, seq.trace, strict=True):
            nodes = [*each.drafted, *[token for token, _ in each.branches]]
            path = range(each.accepted) if each.path is None else each.path
            assert [nodes[place] for place in path] == list(each.emitted[: each.accepted])
            assert (each.on_chain, each.num_tested) == (event.on_chain, event.drafted)
            if len(each.emitted) > each.accepted and each.drafted:
                assert each.is_fully_accepted == event.is_bonus
        accepted = sum(each.own[1] for each in seq.trace)
        assert accepted == seq.stats.accepted - seq.stats.accepted_branches
        assert json.loads(json.dumps([each.to_json() for each in seq.trace]))


@pytest.mark.parametrize(
    ("trace", "words", "own", "whole"),
    [
        (trace_of(2), "drafted 3 and 3 branches (lookahead), accepted 2;", (3, 2), False),
        (trace_of(3), "accepted 3;", (3, 3), True),
        (trace_of(2, (0, 4)), "accepted 2, 1 of them", (3, 1), False),
        (trace_of(3, (0, 4, 5)), "accepted 3, 2 of them", (3, 1), True),
        (trace_of(1, (3,)), "accepted 1, 1 of them", (3, 0), True),
        (trace_of(3, (0, 4, 5), forced=(0, 1)), "accepted 3, 2 of them", (1, 0), True),
        (trace_of(1, tree=Proposal([5])), "drafted 1 (lookahead), accepted 1;", (1, 1), True),
    ],
    ids=str,
)
def test_a_round_in_words(trace, words, own, whole):
    assert words in trace.describe()
    assert (trace.own, trace.is_fully_accepted) == (own, whole)
    data = trace.to_json()
    assert data["branches"] == [list(each) for each in trace.branches]
    assert data["path"] == (None if trace.path is None else list(trace.path))


def test_forced_tokens_are_no_branches():
    tree = TREE._replace(forced=(0,))
    assert tree.shares(3, 1) == [Share("head", 5, 2, 3, 2), Share("forced", 1, 1)]
    assert tree.shares(0, 0) == [Share("head", 5, 0, 3, 0), Share("forced", 1, 0)]


def test_a_drafter_whose_branches_alone_are_accepted_is_no_useless_one(decoded):
    event = RoundEvent(decoded[1][0], [8, 1], 6, 1, False, TREE, path=(3,))
    useless = event._replace(accepted=0, path=None, proposal=TREE._replace(drafter="x"))
    for each, count in ((event, 0), (useless, 1)):
        said = []
        watch = NeverAccepted(said.append)
        for _ in range(20):
            watch.on_round(RoundRecord([each], 0, 1.0))
        assert len(said) == count


def test_pieces_say_which_tokens_stood_beside_the_chain(decoded, capsys):
    request = decoded[1][0]
    request._pieces = [("a", 0)] * 4
    event = RoundEvent(request, [5, 9, 4, 2], 6, 3, True, TREE, path=(0, 4, 5))
    pieces = make_chunk(event).pieces
    assert [piece.is_branch for piece in pieces] == [False, True, True, False]
    assert [piece.kind for piece in pieces] == ["accepted"] * 3 + ["bonus"]
    assert [piece.drafter for piece in pieces] == ["head"] * 3 + [""]
    request._pieces = [("a", 0)] * 2  # the text ended inside the path
    ended = event._replace(tokens=[5, 9], accepted=2, is_bonus=False)
    assert [piece.is_branch for piece in make_chunk(ended).pieces] == [False, True]
    chunk = StreamChunk([StreamPiece("x", 1, "accepted", is_branch=True)], None, request.stats)
    print_chunk(chunk, colour=True)
    assert "\x1b[32m\x1b[4mx" in capsys.readouterr().out
