"""Branches where the controller chooses: what they are worth is learned, and as many are tested as pay."""

import pytest

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.lookahead import trees
from specexport_runtime.lookahead.trees import BranchCandidate, select_worth_testing
from specexport_runtime.requests.records import Branch, DraftStage, Proposal
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.goodput_fakes import (
    CAPACITY,
    LOOKAHEAD,
    curves,
    make_sequences,
    model_decoder,
    modelled_seconds,
)
from tests.support.fakes.loop import VOCAB, finish, goodput_length, make_sequence
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import LENGTH, least_p_value, make_requests, small_model


def decode(curve, *, tree_size, noise=0.4, count=1, max_tokens=500, params=None):
    """Modelled seconds, and the sequences, of a draft model of the target's likes."""
    target, draft = FakeExecutor(VOCAB, count, CAPACITY), FakeExecutor(VOCAB, count, CAPACITY, noise=noise)
    target.takes_trees = True
    sequences = make_sequences(count, ["draft-model"], max_tokens, params=params, tree_size=tree_size, trace=True)
    finish(model_decoder(goodput_length(curve, LOOKAHEAD), target, draft), sequences)
    return modelled_seconds(curve, target, draft), sequences, target


@pytest.mark.parametrize(
    ("per_token", "least", "count"), [(0.002, 1.03, 1), (0.02, 1.0, 1), (0.2, 0.99, 1), (0.002, 1.03, 4)]
)
def test_trees_are_no_slower_than_chains_and_faster_where_tests_are_cheap(per_token, least, count):
    curve, options = curves(draft=0.3, per_token=per_token), {"count": count, "max_tokens": 500 if count == 1 else 300}
    chain, plain, _ = decode(curve, tree_size=0, **options)
    tree, grown, _ = decode(curve, tree_size=63, **options)
    assert [seq.output for seq in grown] == [seq.output for seq in plain]
    assert chain / tree > least


def test_where_a_test_is_dear_nothing_is_looked_at_but_now_and_then():
    curve = curves(draft=0.3, per_token=0.9)
    _, (seq,), _ = decode(curve, tree_size=63)
    assert seq.stats.drafted == sum(len(each.drafted) for each in seq.trace), "no branch was tested"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_is_no_larger_than_the_request_allows(temperature):
    params = SamplingParams(max_tokens=500, temperature=temperature, seed=1)
    _, (seq,), target = decode(curves(draft=0.3, per_token=0.0001), tree_size=10, params=params)
    widest = max(call.num_tokens for call in target.calls if call.num_logit_rows > 1)
    assert widest == 11, "with the newest token"
    assert seq.stats.drafted > 7 * seq.stats.draft_rounds


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_sampled_trees_of_any_size_leave_the_target_s_distribution(acceptance):
    target, draft = small_model(), small_model(noise=0.8)
    target.takes_trees = True
    decoder = model_decoder(goodput_length(curves(draft=0.1, per_token=0.001), 4), target, draft)
    requests = make_requests(
        700, SamplingParams(max_tokens=LENGTH + 1, temperature=0.8), adaptive=True, tree_size=63, acceptance=acceptance,
        draft_plan=[DraftStage("draft-model", 4)],
    )  # fmt: skip
    finish(decoder, requests)
    assert decoder.times.moved > 50
    assert least_p_value(target, requests) > P_VALUE


def test_as_many_are_tested_as_give_most_tokens_a_second():
    found = [BranchCandidate(gain, 0, place) for place, gain in enumerate([0.1, 0.5, 0.02, 0.3])]
    assert [each.place for each in select_worth_testing(found, 2.0, [1.0, 1.05, 1.1, 1.15, 1.2])] == [1, 3]
    assert select_worth_testing(found, 2.0, [1.0, 1.3, 1.6, 1.9, 2.2]) == []
    assert len(select_worth_testing(found, 2.0, [1.0] * 5)) == 4
    assert select_worth_testing([BranchCandidate(0.01, 0, 0)], 2.0, [1.0, 1.0]) == [], (
        "less than the error of what is known"
    )


def test_branches_are_kept_with_their_parents():
    proposal = Proposal([5, 6], branches=(Branch(7, -1), Branch(8, 2), Branch(9, 0), Branch(3, 3)))
    kept = trees.keep_branches(proposal, {2, 0, 1})
    assert kept.branches == (Branch(7, -1), Branch(8, 2), Branch(9, 0))
    assert trees.keep_branches(proposal, {2}).branches == (Branch(9, 0),)
    assert trees.compute_token_reach(proposal._replace(forced=(0,)), [0.4]) == [1.0, 0.4]


def test_what_the_text_takes_is_counted_and_what_it_does_not_come_to_is_not():
    chances = trees.make_shared_chances()
    seq = make_sequence(0, [1, 2, 3], SamplingParams(max_tokens=9))
    seq.tokens += [5, 9, 4]  # the chain's first token, then its branch
    proposal = Proposal(
        [5, 6, 7], branches=(Branch(9, 0, ratio=0.6), Branch(8, -1, ratio=0.6), Branch(4, 1, ratio=0.6))
    )
    before = chances.failure_rates[trees.find_slot(proposal.branches[0])]
    tests = list(chances.tests)
    trees.observe(chances, seq, proposal, 3)
    slot = trees.find_slot(proposal.branches[0])
    assert chances.failure_rates[slot] < before, "one of two"
    assert chances.tests[slot] > tests[slot] + 1.5
    assert [new for i, new in enumerate(chances.tests) if i != slot] == [
        old for i, old in enumerate(tests) if i != slot
    ]
