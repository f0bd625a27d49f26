"""Trees are exact: every draw of a round is integrated, and what comes out is the target's distribution to 1e-12.

As in ``test_block``: a round is run once for each way that its comparisons and draws can end.
"""

from collections import Counter

import numpy as np
import pytest

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.requests.records import Branch, Proposal
from specexport_runtime.sampling import accept, block, tree
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.distribution import HostDistribution
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.tree import TREE_RULES, accept_tree, accept_tree_block, accept_tree_greedy, without
from tests.support.references import drawn
from tests.support.references.drawn import distribution, error

VOCAB, LENGTH = drawn.Models.VOCAB, 4


@pytest.fixture(autouse=True)
def whole_distribution(monkeypatch):
    drawn.integrate(monkeypatch, accept, block, tree)


# A shape says what the children of each node are: "d" one that is drawn, "t" the likeliest token of the draft that is
# no elder sibling (it depends on them), "0" to "2" that token; after each its own children.
SHAPES = {
    "plain": [],
    "chain": [("d", [("d", [("d", [])])])],
    "siblings": [("d", []), ("d", [])],
    "all tokens": [("d", []), ("d", []), ("d", [])],
    "wide and deep": [("d", [("d", []), ("d", [])]), ("d", [("d", [])])],
    "deep sibling": [("d", []), ("d", [("d", [("d", [])])])],
    "full": [("d", [("d", []), ("d", [])]), ("d", [("d", []), ("d", [])])],
    "certain": [("0", [("1", []), ("2", [])]), ("1", [("1", [("0", [])])])],
    "certain chain": [("0", [("1", [("0", [])])])],
    "mixed below": [("d", [("0", []), ("1", [])]), ("d", [("d", [])])],
    "certain above": [("0", [("d", []), ("d", [])]), ("2", [("d", [])])],
    "drawn, then certain": [("d", [("d", []), ("t", [])]), ("t", [("d", [])])],
    "certain, then drawn": [("1", [("d", [])]), ("d", [("2", []), ("d", [])])],
    "between": [("d", []), ("t", [("d", [])]), ("d", [])],
}


def grow(models, way, shape):
    """A proposal of a shape. A shape that depends on what was drawn is a function of tokens and depth."""
    tokens, parents, distributions, waiting = [], [], [], [((), -1, shape)]
    while waiting:
        text, parent, children = waiting.pop(0)
        if callable(children):
            children = children(text)
        elder = []
        for how, below in children:
            drawn_from = models.draft(text)
            left = 1.0 - sum(drawn_from.probability(x) for x in elder)
            if how in "dt" and left < 1e-9:
                break  # no token is left
            if how == "d":
                rest = without(drawn_from, elder)
                token = drawn.draw(rest, drawn.Uniform(way))
            elif how == "t":
                token = max((x for x in range(VOCAB) if x not in elder), key=drawn_from.probability)
            else:
                token = int(how)
                if token in elder:
                    continue
            elder.append(token)
            distributions.append(drawn_from if how == "d" else None)
            tokens.append(token)
            parents.append(parent)
            waiting.append(((*text, token), len(tokens) - 1, below))
    return in_order(tokens, parents, distributions)


def in_order(tokens, parents, distributions):
    chain, place = [], -1
    while place in parents:
        place = parents.index(place)
        chain.append(place)
    order = chain + [i for i in range(len(tokens)) if i not in chain]
    place_of = {-1: -1, **{old: new for new, old in enumerate(order)}}
    branches = tuple(Branch(tokens[i], place_of[parents[i]], distributions[i]) for i in order[len(chain) :])
    return Proposal([tokens[i] for i in chain], [distributions[i] for i in chain], branches=branches)


def run_round(models, rule, shape, way):
    proposal = grow(models, way, shape)
    nodes, parents = proposal.nodes, proposal.parents
    asked = []

    def target(place):
        asked.append(place)
        return models.target(tuple(nodes[i] for i in proposal.path_to(place)))

    verdict = rule(nodes, parents, drawn.distributions_of(proposal), target, drawn.WholeDraws(way))
    assert len(set(asked)) == len(asked)
    path = drawn.path_of(verdict)
    assert len(path) == verdict.accepted
    assert list(path) == (proposal.path_to(path[-1]) if path else [])
    assert verdict.is_bonus == ((path[-1] if path else -1) not in parents)
    return tuple(nodes), verdict, (*[nodes[i] for i in path], verdict.next_token)


KINDS = [{}, {"sparse": True}, {"kind": "same"}, {"kind": "disjoint"}, {"kind": "disjoint", "sparse": True}]


def judged(models, rule, shape):
    """Largest difference of the distribution of a text that begins with a round, and mean draft tokens that stay."""
    rounds, accepted = Counter(), 0.0
    for (_, verdict, tokens), weight in distribution(lambda way: run_round(models, rule, shape, way)).items():
        rounds[tokens] += weight
        accepted += weight * verdict.accepted
    return error(rounds, models.target, LENGTH), accepted


def below(text):
    return [("d", [])] * (1 + sum(text) % 2)


SHAPES["by what it keeps"] = [("d", below), ("d", below)]


@pytest.mark.parametrize(
    ("shape", "models"),
    [(shape, kind) for number, shape in enumerate(SHAPES) for kind in (KINDS[0], KINDS[1 + number % 4])],
    ids=str,
)
def test_a_round_leaves_the_distribution_of_the_text_as_it_is_and_a_whole_tree_keeps_no_fewer_tokens(shape, models):
    for seed in range(1 if shape in ("full", "wide and deep") else 2):
        means = []
        for rule in (accept_tree_block, accept_tree):
            wrong, accepted = judged(drawn.Models(seed, **models), rule, SHAPES[shape])
            assert wrong < 1e-12
            means.append(accepted)
        assert means[0] >= means[1] - 1e-12


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
@pytest.mark.parametrize("shape", ["siblings", "wide and deep", "mixed below", "certain, then drawn", "certain above"])
def test_where_there_is_no_distribution_the_draft_ends_and_it_is_an_error_if_the_text_comes_there(shape, rule):
    for seed in range(2):
        made = drawn.Models(seed)
        made.target, expected = drawn.with_dead_ends(made.target)

        def run(way, made=made):
            try:
                return run_round(made, rule, SHAPES[shape], way)[2]
            except drawn.NoDistributionError as error:
                return (*error.text, drawn.NO_DISTRIBUTION)

        assert error(distribution(run), expected, LENGTH, VOCAB + 1) < 1e-12


def test_a_tree_keeps_more_than_its_chain_and_the_whole_more_than_one_by_one():
    for seed in range(3):
        made, shape = drawn.Models(seed), SHAPES["wide and deep"]
        chain, small, whole = (
            judged(made, rule, each)[1]
            for rule, each in ((accept_tree, [("d", [("d", [])])]), (accept_tree, shape), (accept_tree_block, shape))
        )
        assert whole > small > 1.03 * chain


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_drawn_branches_that_are_dropped_or_not_drawn_apart_are_noticed(rule, monkeypatch):
    """Left out for its value, as a bound on the whole tree by probability would do it; or drawn with replacement."""

    def dropping(nodes, parents, distributions, target, draws):
        kept = [i for i, p in enumerate(parents) if not (i and p < 0 and distributions[i].probability(nodes[i]) < 0.3)]
        return rule(
            [nodes[i] for i in kept], [parents[i] for i in kept], [distributions[i] for i in kept], target, draws
        )

    assert max(judged(drawn.Models(seed), dropping, SHAPES["siblings"])[0] for seed in range(3)) > 1e-3
    monkeypatch.setattr(tree, "without", lambda distribution, elder: distribution)
    assert judged(drawn.Models(0), rule, SHAPES["siblings"])[0] > 1e-3


@pytest.mark.parametrize("name", TREE_RULES)
@pytest.mark.parametrize("kind", ["other", "same", "disjoint"])
def test_a_drawn_chain_is_accepted_by_the_same_numbers_as_a_chain(name, kind):
    for seed in range(100):
        made, rng = drawn.Models(seed % 7, kind), np.random.default_rng(seed)
        tokens, distributions = [], []
        for _ in range(seed % 5):
            distributions.append(made.draft(tuple(tokens)))
            tokens.append(distributions[-1].draw(rng.random()))
        ours, theirs = [RoundDraws(RandomStream(seed)) for _ in range(2)]
        calls, expected_calls = [], []

        def target(place, calls=calls, made=made, tokens=tokens):
            calls.append(place + 1)
            return made.target(tuple(tokens[: place + 1]))

        def expected_target(j, calls=expected_calls, made=made, tokens=tokens):
            calls.append(j)
            return made.target(tuple(tokens[:j]))

        verdict = TREE_RULES[name](tokens, range(-1, len(tokens) - 1), distributions, target, ours)
        assert verdict == RULES[name](tokens, distributions, expected_target, theirs)
        assert calls == expected_calls  # no row is processed that a chain leaves alone


@pytest.mark.parametrize("name", TREE_RULES)
def test_a_tree_without_draws_gives_the_tokens_of_plain_decoding(name):
    """The same numbers give the same text, whatever was copied."""
    for seed in range(20):
        made, rng = drawn.Models(seed % 5), np.random.default_rng(seed)
        plain, stream, copied = [], RandomStream(seed), RoundDraws(RandomStream(seed))
        for position in range(12):
            plain.append(made.target(tuple(plain)).draw(stream.draws(position).resample))
        text = []
        while len(text) < 12:
            nodes, parents = random_tree(rng)
            proposal = in_order(nodes, parents, [None] * len(nodes))

            def target(place, proposal=proposal, text=text, made=made):
                return made.target((*text, *[proposal.nodes[i] for i in proposal.path_to(place)]))

            verdict = TREE_RULES[name](proposal.nodes, proposal.parents, None, target, copied)
            text += [proposal.nodes[i] for i in drawn.path_of(verdict)] + [verdict.next_token]
            copied.end_round()
        assert text[:12] == plain


def random_tree(rng):
    """Nodes and parents of a tree of up to eight nodes whose siblings differ."""
    nodes, parents = [], []
    for _ in range(rng.integers(9)):
        token, parent = int(rng.integers(VOCAB)), int(rng.integers(-1, len(nodes)))
        if (token, parent) not in zip(nodes, parents, strict=True):
            nodes.append(token)
            parents.append(parent)
    return nodes, parents


def test_greedy_tokens_are_followed_through_the_tree():
    rng = np.random.default_rng(3)
    for _ in range(300):
        nodes, parents = random_tree(rng)
        proposal = in_order(nodes, parents, [None] * len(nodes))
        text, asked = rng.integers(VOCAB, size=12).tolist(), []

        def greedy(place, proposal=proposal, text=text, asked=asked):
            asked.append(place)
            return text[len(proposal.path_to(place))]

        verdict = accept_tree_greedy(proposal.nodes, proposal.parents, greedy)
        path = drawn.path_of(verdict)
        assert [proposal.nodes[i] for i in path] + [verdict.next_token] == text[: len(path) + 1]
        assert asked == [-1, *path]
        assert verdict.is_bonus == (asked[-1] not in proposal.parents)
        longest = max(
            (p for p in map(proposal.path_to, range(len(nodes))) if [proposal.nodes[i] for i in p] == text[: len(p)]),
            key=len,
            default=[],
        )
        assert list(path) == longest


def test_the_best_chain_is_no_path():
    assert accept_tree_greedy([4, 5, 6], [-1, 0, 0], {-1: 4, 0: 5, 1: 9}.__getitem__) == Verdict(2, 9, True)
    assert accept_tree_greedy([4, 5, 6], [-1, 0, 0], {-1: 4, 0: 6, 2: 9}.__getitem__) == Verdict(2, 9, True, (0, 2))
    assert accept_tree_greedy([4, 5, 6], [-1, 0, 0], {-1: 7}.__getitem__) == Verdict(0, 7, False)
    assert accept_tree_greedy([], [], {-1: 7}.__getitem__) == Verdict(0, 7, True)


def test_the_numbers_of_branches_are_their_own():
    stream, draws = RandomStream(5), RoundDraws(RandomStream(5))
    places = [stream.draws(p) for p in range(300)]
    branches = [stream.branch(p, n) for p in range(6) for n in (0, 1, 63, 64, 65, 1000)]
    assert len({number for each in places + branches for number in each}) == 3 * (len(places) + len(branches))
    assert [stream.draws(p) for p in range(300)] == places
    assert [RandomStream(5).branch(p, n) for p in range(6) for n in (0, 1, 63, 64, 65, 1000)] == branches
    assert draws.branch(3) == stream.branch(0, 3)
    assert draws(1) == places[1]
    draws.end_round()
    assert draws.branch(3) == stream.branch(2, 3)


def test_what_is_left_for_a_sibling():
    dense, sparse = (
        HostDistribution(None, np.array([0.5, 0.25, 0.25])),
        HostDistribution(np.array([2, 7]), np.array([0.2, 0.8])),
    )
    assert without(dense, [0, 9]).probs.tolist() == [0.0, 0.5, 0.5]
    assert without(sparse, [7, 3]).probability(2) == 1.0
    assert dense.probs.tolist() == [0.5, 0.25, 0.25]
    with pytest.raises(CheckFailedError, match="3 tokens in one place"):
        without(sparse, [2, 7])
    distributions = [dense, dense, sparse]
    with pytest.raises(CheckFailedError, match="in its own draft distribution"):
        accept_tree(
            [0, 1, 5],
            [-1, -1, -1],
            distributions,
            lambda _: HostDistribution(None, np.eye(9)[8]),
            RoundDraws(RandomStream(0)),
        )
