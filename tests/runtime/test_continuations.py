"""Copies as trees: where a text went on in more than one way, the other ways are branches, and more is accepted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.continuations import Continuations
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.suffix import SuffixDrafter
from specexport_runtime.drafters.suffix_store import SuffixStore
from specexport_runtime.requests.records import Branch, DraftPrefix, DraftStage
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.tree import accept_tree_greedy
from tests.support.cases.chance import examples
from tests.support.fakes.requests import request_of

MOST = 400


def request(tokens, tree_size=0, name="lookup", **options):
    return request_of(
        0, tokens, SamplingParams(max_tokens=MOST), vocab_size=10_000, max_model_len=5000, scope="",
        draft_plan=(DraftStage(name, 7),), tree_size=tree_size, **options,
    )  # fmt: skip


def store_of(*texts):
    store = SuffixStore(50_000)
    for text in texts:
        store.add("", text)
    return store


def lookup(tokens, count, tree_size, **options):
    return LookupDrafter(gate=False).propose([request(tokens, tree_size, **options)], [count])[0]


def shape(proposal):
    nodes = proposal.nodes
    places = range(len(proposal.tokens), len(nodes))
    return proposal.tokens, [[nodes[i] for i in proposal.path_to(place)] for place in places]


def leaves(proposal):
    chain, paths = shape(proposal)
    return chain, [path for path in paths if not any(other[:-1] == path for other in paths)]


def test_what_followed_the_same_words_before_is_a_branch():
    text = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]
    assert shape(lookup(text, 3, 0)) == ([6, 7, 8], [])
    assert leaves(lookup(text, 3, 9)) == ([6, 7, 8], [[3, 4, 5]])
    first, second, third = lookup(text, 3, 9).branches
    assert [each.parent for each in (first, second, third)] == [-1, 3, 4]
    assert 0 < first.ratio < second.ratio == third.ratio == 1, "beside the likeliest in their place"


def test_branches_come_from_shorter_matches_too_the_longest_first():
    text = [0, 1, 2, 3, 0, 8, 1, 2, 4, 5, 9, 1, 2, 6, 5, 0, 1, 2]
    proposal = lookup(text, 2, 6)
    assert leaves(proposal) == ([3, 0], [[6, 5], [4, 5]])
    assert [branch.token for branch in lookup(text, 2, 3).branches] == [6]


def test_a_branch_ends_with_its_text():
    found = lookup([5, 1, 2, 6, 6, 1, 2], 3, 20, reference=[1, 2, 3, 4])
    assert leaves(found) == ([6, 6, 1], [[3, 4]])
    # A match at the end of the reference foretells nothing.
    assert leaves(lookup([1, 2, 6, 7, 1, 2], 2, 9, reference=[4, 1, 2])) == ([6, 7], [])


def test_branches_stand_behind_what_a_grammar_forces():
    text = [1, 2, 3, 4, 9, 1, 2, 5, 3, 4, 8, 2]
    drafter, begun = LookupDrafter(gate=False), DraftPrefix([3, 4], 8)
    proposal = drafter.propose([request(text, 9)], [2], [begun])[0]
    assert leaves(proposal) == ([3, 4, 9, 1], [[3, 4, 8, 2]])
    assert proposal.forced == (0, 1)
    assert proposal.branches[0].parent == 1
    made = SuffixDrafter(store_of([7, 7, 2, 3, 4, 6, 6], [7, 7, 2, 3, 4, 5, 5]))
    proposal = made.propose([request([7, 7, 2], 20, "suffix", adaptive=False)], [2], [begun])[0]
    assert leaves(proposal) == ([3, 4, 5, 5], [[3, 4, 6, 6]])


def test_there_are_as_many_branches_as_may_be():
    text = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]
    assert lookup(text, 3, 3).branches == ()
    assert leaves(lookup(text, 3, 5)) == ([6, 7, 8], [[3, 4]])
    many = [token for i in range(9) for token in (1, 2, *range(10 * i, 10 * i + 6))] + [1, 2]
    assert len(lookup(many, 7, 63).branches) == 21
    made = request(many, 63, adaptive=True)
    assert LookupDrafter().propose([made], [7])[0].branches == (), "a controller says how many are looked at"
    made.siblings = (2, 2, 1)
    assert LookupDrafter().propose([made], [7])[0].branches == lookup(many, 7, 7 + 5).branches


def test_the_store_s_other_continuations_are_branches_by_their_counts():
    texts = [[9, 1, 2, 3, *rest] for rest in ([4, 5, 6], [4, 5, 6], [4, 5, 7], [8, 5, 6])]
    made = SuffixDrafter(store_of(*texts))
    proposal = made.propose([request([9, 1, 2, 3], 20, "suffix")], [3])[0]
    assert leaves(proposal) == ([4, 5, 6], [[8, 5, 6], [4, 5, 7]])
    ratios = {branch.token: branch.ratio for branch in proposal.branches}
    assert ratios[8] == pytest.approx(1 / 3)
    assert ratios[7] == pytest.approx(1 / 2)
    small = made.propose([request([9, 1, 2, 3], 5, "suffix")], [3])[0]
    assert [branch.token for branch in small.branches] == [8, 5]


def test_the_likeliest_ways_are_kept_their_beginnings_first():
    found = Continuations([1, 2])
    found.add([1, 2], [0.5, 0.3])
    found.add([3, 4, 5], [0.2, 0.2, 0.1])
    found.add([1, 6], [0.0, 0.15])
    found.add([3, 7], [0.1, 0.05])
    found.add([1, 2, 9], [0.1, 0.1, 0.08])
    assert found.branches(9) == (
        Branch(3, -1, ratio=pytest.approx(0.5)), Branch(4, 2, ratio=1.0), Branch(6, 0, ratio=pytest.approx(0.375)),
        Branch(5, 3, ratio=1.0), Branch(9, 1, ratio=1.0), Branch(7, 2, ratio=pytest.approx(0.25)),
    )  # fmt: skip
    assert found.branches(2) == found.branches(9)[:2]
    assert found.branches(0) == ()


@examples(100)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.integers(1, 7), st.integers(0, 20), st.booleans())
def test_every_branch_is_what_followed_somewhere(text, count, tree_size, stored):
    if stored:
        half = len(text) // 2
        made = SuffixDrafter(store_of(text[:half], text[half:]))
        text = text[-4:]
    else:
        made = LookupDrafter(gate=False)
    chain = made.propose([request(text, 0, "suffix" if stored else "lookup")], [count])[0]
    proposal = made.propose([request(text, tree_size, "suffix" if stored else "lookup")], [count])[0]
    nodes, parents = proposal.nodes, proposal.parents
    assert proposal._replace(branches=()) == chain
    assert len(nodes) <= max(tree_size, len(chain.tokens))
    assert len(set(zip(nodes, parents, strict=True))) == len(nodes), "siblings differ"
    for place in range(len(proposal.tokens), len(nodes)):
        assert parents[place] < place
        path = [nodes[i] for i in proposal.path_to(place)]
        assert len(path) <= count
        if not stored:
            end = [*text, *path][-3:]
            assert any(text[i : i + 3] == end for i in range(len(text)))
    assert all(0 < branch.ratio <= 1 and branch.distribution is None for branch in proposal.branches)


def versions_of(seed):
    """Five versions of a text, and one more, which has in each of 60 places what only one of them has there."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(9000)[: 60 * 7].reshape(60, 7).tolist()
    choices = np.zeros((5, 60), int)
    choices[rng.integers(0, 4, 60), range(60)] = 1
    versions = [
        [token for each, rare in zip(ids, row, strict=True) for token in each[:3] + (each[5:] if rare else each[3:5])]
        for row in choices.tolist()
    ]
    return versions, [token for each in ids for token in (*each[:3], *each[5:])]


def rounds(made, prompt, truth, tree_size, name):
    """Rounds that a text takes whose target is sure of it, and draft tokens that were accepted in branches."""
    asked, text = request(prompt, tree_size, name), [*prompt, *truth]
    asked.commit(truth[:3])
    count = beside = 0
    while len(asked.tokens) < len(text):
        most = min(7, len(text) - len(asked.tokens) - 1)
        proposal = made.propose([asked], [most])[0]

        def greedy(place, proposal=proposal):
            return text[len(asked.tokens) + len(proposal.path_to(place))]

        verdict = accept_tree_greedy(proposal.nodes, proposal.parents, greedy)
        path = range(verdict.accepted) if verdict.path is None else verdict.path
        asked.commit([*[proposal.nodes[i] for i in path], verdict.next_token])
        count, beside = count + 1, beside + sum(place >= len(proposal.tokens) for place in path)
    assert asked.tokens == text
    return count, beside


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_an_edit_that_takes_up_what_was_said_once_takes_fewer_rounds(name):
    chains, trees, accepted = 0, 0, 0
    for seed in range(3):
        versions, truth = versions_of(seed)
        prompt = [token for version in versions for token in version]
        made = LookupDrafter(gate=False) if name == "lookup" else SuffixDrafter(store_of())
        chains += rounds(made, prompt, truth, 0, name)[0]
        found, beside = rounds(made, prompt, truth, 20, name)
        trees, accepted = trees + found, accepted + beside
    assert trees * 1.3 < chains
    assert accepted > 3 * 60
