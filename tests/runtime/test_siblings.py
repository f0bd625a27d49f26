"""Branches of models' drafts: the other likely tokens of the same logits, and nothing at all for chains."""

import itertools
import math

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.drafters import draft_loop
from specexport_runtime.drafters.forced import list_branches_after_cut, shorten
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.siblings import MAX_SIBLINGS, MIN_RATIO, combine_branches, find_runners_up
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import Branch, DraftStage, Proposal
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from tests.support.fakes.loop import CAPACITY, VOCAB, make_sequence

PLAN = (DraftStage("draft-model", 4),)
PROMPTS = [[3, 1], [1, 2, 3, 4, 5], [16] * 9]


def best_beside(logits, token, count):
    """The ``count`` likeliest tokens beside one, by sorting all; no less likely than ``MIN_RATIO`` beside it."""
    values = np.asarray(logits, np.float64)
    ranked = [int(each) for each in np.lexsort((np.arange(len(values)), -values)) if each != token]
    return [each for each in ranked if np.exp(values[each] - values[token]) >= MIN_RATIO][:count]


def propose(tree_size, *, rows=3, cut_head=None, lookahead=4, **options):
    draft = FakeExecutor(VOCAB, rows, CAPACITY)
    drafter = ModelDrafter(ModelRunner(draft), vocab_size=VOCAB, max_backlog=16, cut_head=cut_head)
    params = SamplingParams(max_tokens=40, **options)
    requests = [
        make_sequence(i, prompt, params, draft_plan=PLAN, tree_size=tree_size, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    for row, request in enumerate(requests):
        request.row = row
        request.commit([2])
    return drafter.propose(requests, [lookahead] * len(requests)), requests, draft


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7, "logit_bias": {4: 3.0}}], ids=["plain", "bias"])
def test_siblings_are_the_next_best_tokens_of_the_same_logits(options):
    found, requests, draft = propose(40, **options)
    for proposal, request in zip(found, requests, strict=True):
        sampler, beside = Sampler(request.params, request.tokens[:-1], VOCAB), {}
        sampler.append([2])
        for place, token in enumerate(proposal.tokens):
            logits = draft.logits_after([*request.tokens, *proposal.tokens[:place]])
            best = sampler.allowed_logits(logits, proposal.tokens[:place])[0]
            assert int(best.argmax()) == token
            beside[place - 1] = best_beside(best, token, MAX_SIBLINGS)
        assert [(each.parent, each.token) for each in proposal.branches] == [
            (parent, token) for parent, tokens in beside.items() for token in tokens
        ]
        assert all(MIN_RATIO <= each.ratio <= 1 and each.distribution is None for each in proposal.branches)


def test_siblings_of_a_cut_head_are_its_own_tokens():
    ids = np.array([0, 2, 3, 5, 8, 9, 11, 12, 14, 16], np.int32)
    found, _, _ = propose(8, cut_head=CutHead(ids, VOCAB))
    whole, _, _ = propose(8)
    assert any(proposal.branches for proposal in found)
    assert {token for proposal in found for token in proposal.nodes} <= set(ids.tolist())
    assert not {token for proposal in whole for token in proposal.nodes} <= set(ids.tolist())


@pytest.mark.parametrize("size", [4, 7, 12])
def test_a_fixed_tree_has_the_most_likely_paths(size):
    """By cumulative probability among the tokens that were looked at (EAGLE-2)."""
    every, _, _ = propose(63)
    found, requests, draft = propose(size)
    for all_of_them, proposal, request in zip(every, found, requests, strict=True):
        assert proposal.tokens == all_of_them.tokens
        assert len(proposal.nodes) <= size
        if len(all_of_them.nodes) >= size and size < 4 + MAX_SIBLINGS:
            assert len(proposal.nodes) == size
        chances, reached = {}, 1.0
        for place, token in enumerate(proposal.tokens):
            logits = draft.logits_after([*request.tokens, *proposal.tokens[:place]]).astype(np.float64)
            near = [token, *best_beside(logits, token, MAX_SIBLINGS if size > 11 else size - 4)]
            weights = np.exp(logits[near])
            for other, weight in zip(near[1:], weights[1:], strict=True):
                chances[place - 1, other] = reached * weight / weights.sum()
            reached *= weights[0] / weights.sum()
        best = sorted(chances, key=lambda each: -chances[each])[: size - 4]
        assert {(each.parent, each.token) for each in proposal.branches} == set(best)


def test_nothing_is_computed_for_chains(monkeypatch):
    def refuse(*args):
        raise AssertionError("a chain has no siblings")

    execute, wants = FakeExecutor.execute, set()
    monkeypatch.setattr(FakeExecutor, "execute", lambda self, want="logits": (wants.add(want), execute(self, want))[1])
    monkeypatch.setattr(draft_loop, "find_runners_up", refuse)
    found, _, _ = propose(0)
    assert all(proposal.tokens and not proposal.branches for proposal in found)
    assert wants == {"token_ids"}


def test_the_row_that_is_looked_at_stays_as_it_was_and_without_numbers_there_are_no_siblings():
    logits = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
    logits.flags.writeable = False
    token = int(logits.argmax())
    assert [each for each, _ in find_runners_up(logits, token, 5)] == best_beside(logits, token, 5)
    for peak in (np.nan, np.inf):
        assert find_runners_up(np.array([1.0, peak, 2.0], np.float32), 1, 3) == []


def test_branches_follow_a_chain_that_is_cut_or_goes_on():
    # The chain 1 2 3; beside 1: 10, after which comes 11; beside 2: 12; beside 3: 13; after 3: 14.
    def branches(behind, *rest):
        return (Branch(10, -1), Branch(11, behind), *rest)

    others = (Branch(12, 0), Branch(13, 1), Branch(14, 2))
    proposal = Proposal([1, 2, 3], branches=branches(3, *others))
    assert list_branches_after_cut(proposal, 3) == proposal.branches
    assert list_branches_after_cut(proposal, 5) == branches(5, *others)
    assert [shorten(proposal, count, "text").branches for count in (2, 1, 0)] == [
        branches(2, others[0]), branches(1), (),
    ]  # fmt: skip


def test_where_places_know_nothing_of_each_other_any_token_may_follow_any():
    """The best by cumulative probability, of all ways through the places: by brute force."""
    tokens = [1, 2, 3]
    beside = (Branch(11, -1, ratio=0.6), Branch(12, -1, ratio=0.1), Branch(21, 0, ratio=0.3), Branch(31, 1, ratio=0.9))
    ways = [[(1, 1.0), (11, 0.6), (12, 0.1)], [(2, 1.0), (21, 0.3)], [(3, 1.0), (31, 0.9)]]
    chances = {}
    for length in (1, 2, 3):
        for path in itertools.product(*ways[:length]):
            chance = math.prod(ratio / sum(r for _, r in ways[depth]) for depth, (_, ratio) in enumerate(path))
            chances[tuple(token for token, _ in path)] = chance
    others = sorted((path for path in chances if list(path) != tokens[: len(path)]), key=lambda path: -chances[path])
    for room in range(len(others) + 1):
        proposal = Proposal(tokens, branches=combine_branches(beside, tokens, room))
        paths = [
            tuple(proposal.nodes[each] for each in proposal.path_to(place)) for place in range(3, len(proposal.nodes))
        ]
        assert sorted(chances[path] for path in paths) == sorted(chances[path] for path in others[:room])
        assert len(set(paths)) == room
    assert len(combine_branches(beside, tokens, 99)) == len(others)
