"""Sampled drafts of models as trees: each sibling comes from what its elders leave; the text's distribution stays.

A round is run once for each way that its draws and comparisons can end, the drafter's own among them (``test_block``).
"""

from functools import cache

import numpy as np
import pytest

from specexport_runtime.drafters import draft_loop, siblings
from specexport_runtime.drafters.at_once import ParallelWork
from specexport_runtime.drafters.draft_loop import draft_at_once, open_drafts
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.siblings import MAX_SIBLINGS, choose_default_siblings, draw_siblings
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling import accept, tree
from specexport_runtime.sampling.distribution import HostDistribution
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from specexport_runtime.sampling.tree import TREE_RULES, without
from tests.support.fakes.requests import request_of
from tests.support.references.drawn import WholeDraws, distribution, distributions_of, error, integrate, path_of

VOCAB, PROMPT = 3, [1, 2]
PLAN = (DraftStage("draft-model", 2),)


@pytest.fixture
def whole_distribution(monkeypatch):
    integrate(monkeypatch, accept, tree, draft_loop, siblings)


def model(**options):
    return FakeExecutor(options.pop("vocab", VOCAB), 1, 40, context=3, sharpness=1.2, **options)


def request(tree_size, *, vocab=VOCAB, plan=PLAN, seed=0, prompt=PROMPT, **options):
    params = SamplingParams(max_tokens=30, **{"temperature": 0.9, **options})
    made = request_of(
        0, prompt, params, vocab_size=vocab, max_model_len=36, draft_plan=plan, tree_size=tree_size, seed=seed
    )
    made.row = 0
    made.commit([0])
    return made


def draft(executor, made, lookahead=2):
    drafter = ModelDrafter(ModelRunner(executor), vocab_size=executor.vocab_size)
    return drafter.propose([made], [lookahead])[0]


def parallel(executor, made, lookahead=2):
    """A draft in one step, each place blind to the tokens before it: of a prompt, whatever it is."""
    drafts = open_drafts([made], [lookahead])
    work = ParallelWork(RowWork([0] * lookahead, lookahead), 0)
    draft_at_once(ModelRunner(executor), drafts, [work], executor.vocab_size)
    return drafts[0].proposal("draft-model")


def distributions(target, made, proposal):
    def behind(place):
        path = [proposal.nodes[i] for i in proposal.path_to(place)]
        return made.sampler.distribution(target.logits_after([*made.tokens, *path]), path)

    return behind


def target_distribution(target, options=None):
    def behind(text):
        sampler = Sampler(SamplingParams(max_tokens=30, **{"temperature": 0.9, **(options or {})}), PROMPT, VOCAB)
        sampler.append([0, *text])
        return sampler.distribution(target.logits_after([*PROMPT, 0, *text]))

    return cache(behind)


@pytest.mark.usefixtures("whole_distribution")
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize(
    ("make", "size", "options"),
    [
        (draft, 3, {}), (draft, 4, {"top_k": 2}), (draft, 4, {"frequency_penalty": 0.8}), (parallel, 4, {}),
        (parallel, 4, {"top_k": 2}), (parallel, 4, {"frequency_penalty": 0.8}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)  # fmt: skip
def test_a_drafter_s_tree_leaves_the_target_s_distribution(make, size, options, rule):
    target, drafts, shapes = model(), model(noise=0.9), set()
    drafts.keeps_rows = False  # it draws by numbers, and these are integrated

    def run_round(way):
        made = request(size, **options)
        made.draws = WholeDraws(way)
        proposal = make(drafts, made)
        shapes.add(tuple(proposal.parents))
        drawn, behind = distributions_of(proposal), distributions(target, made, proposal)
        verdict = TREE_RULES[rule](proposal.nodes, proposal.parents, drawn, behind, made.draws)
        return (*[proposal.nodes[i] for i in path_of(verdict)], verdict.next_token)

    assert error(distribution(run_round), target_distribution(target, options), 3, VOCAB) < 1e-12
    assert max(map(len, shapes)) == (3 if options.get("top_k") else size)


def test_nodes_are_drawn_in_their_order_each_from_its_own_distribution():
    """The chain has the numbers of a chain, and the distribution beside a sibling is that of its place."""
    drafts, wide = model(noise=0.9, vocab=17), 12
    for seed in range(20):
        made, plain = [request(size, vocab=17, seed=seed) for size in (wide, 0)]
        proposal, chain = draft(drafts, made, 3), draft(drafts, plain, 3)
        assert proposal.tokens == chain.tokens
        assert len(proposal.nodes) == wide
        counts, number = choose_default_siblings(made, 3), 0
        for place, token in enumerate(proposal.tokens):
            path, elder = proposal.tokens[:place], [token]
            expected = made.sampler.distribution(drafts.logits_after([*made.tokens, *path]), path)
            assert np.array_equal(proposal.distributions[place].probs, expected.probs)
            for branch in proposal.branches[number : number + counts[place]]:
                assert branch.parent == place - 1
                assert branch.distribution is proposal.distributions[place]
                assert branch.token == without(expected, elder).draw(made.draws.branch(number).draft)
                elder.append(branch.token)
                number += 1
            assert len(set(elder)) == len(elder)
        assert number == len(proposal.branches)


def test_siblings_end_with_the_tokens_that_there_are():
    distribution_of_two = HostDistribution(np.array([3, 8]), np.array([0.3, 0.7]))
    assert draw_siblings(distribution_of_two, 8, [0.5, 0.5, 0.5]) == [3]
    assert draw_siblings(HostDistribution(None, np.array([0.0, 1.0])), 1, [0.5]) == []
    proposal = draft(model(noise=0.9), request(30, top_k=1), 2)
    assert (len(proposal.tokens), proposal.branches) == (2, ())
    assert [len(draft(model(), request(30, top_k=k), 1).nodes) for k in (2, 3)] == [2, 3]


def test_how_many_siblings_there_are_is_known_before_anything_is_drawn():
    """By depth, and by what became of earlier drafts: nearer the text where little was accepted."""
    made = request(12, vocab=17)
    drafts = [draft(model(noise=0.9, vocab=17), request(12, vocab=17, seed=seed), 4) for seed in range(10)]
    assert len({tuple(each.parents) for each in drafts}) == 1
    first = choose_default_siblings(made, 4)
    assert sum(first) == 8
    assert list(first) == sorted(first, reverse=True)
    made.stats.accepted, made.stats.draft_rounds = 2, 60
    poor = choose_default_siblings(made, 4)
    made.stats.accepted = 230
    rich = choose_default_siblings(made, 4)
    assert sum(poor) == sum(rich) == 8
    assert poor[0] > rich[0]
    assert rich[3] > poor[3]


def test_a_chain_has_none_and_no_place_more_than_there_may_be():
    for size, depth in ((0, 4), (4, 4), (3, 4), (4, 0)):
        assert not any(choose_default_siblings(request(size), depth))
    for options in ({}, {"temperature": 0.0}):
        assert choose_default_siblings(request(63, **options), 3) == (MAX_SIBLINGS,) * 3


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_numbers_serve_one_round(acceptance):
    for size in (0, 1):
        made = request_of(
            0, PROMPT, SamplingParams(), vocab_size=3, max_model_len=9, tree_size=size, acceptance=acceptance
        )
        used = made.draws(2)
        made.draws.end_round()
        assert used not in [made.draws(place) for place in range(3)]
