"""Trees are exact: every draw of a round is integrated, and what comes out is the target's law to 1e-12.

As in ``test_block``: a round is run once for each way that its comparisons and draws can end.
"""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.requests.records import Branch, Proposal
from specexport_runtime.sampling import accept, block, tree
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.distribution import Distribution
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.tree import TREE_RULES, accept_tree, accept_tree_block, accept_tree_greedy, without
from tests.support.references.drawn import Uniform, WholeDraws, draw, law, laws_of, path_of
from tests.support.references.exact import P_VALUE, p_value

VOCAB = 3


@pytest.fixture(autouse=True)
def whole_law(monkeypatch):
    for module in (accept, block, tree):
        drawn = module.sample_token
        monkeypatch.setattr(
            module, "sample_token", lambda d, u, drawn=drawn: draw(d, u) if isinstance(u, Uniform) else drawn(d, u)
        )


class Models:
    """A target and a draft whose laws depend on all tokens so far.

    Args:
        seed: of both.
        kind: of the draft: ``other``, ``same`` as the target, ``disjoint`` (it has two of the tokens, the target two).
        sparse: distributions that name their tokens.
        alpha: how even they are.
    """

    def __init__(self, seed, kind="other", *, sparse=False, alpha=0.7):
        self.kind, self.sparse, self.alpha = kind, sparse, alpha
        self.target = cache(lambda text: self._law(seed, 0, text))
        self.draft = cache(lambda text: self._law(seed, 0 if kind == "same" else 1, text))

    def _law(self, seed, model, text):
        probs = np.random.default_rng([seed, model, len(text), *text]).dirichlet(np.full(VOCAB, self.alpha))
        if self.kind == "disjoint":
            probs[2 * model] = 0.0
            probs /= probs.sum()
        ids = np.flatnonzero(probs)
        return Distribution(ids, probs[ids]) if self.sparse else Distribution(None, probs)

    def texts(self, length):
        """The law of a text of the target alone."""
        texts = {(): 1.0}
        for _ in range(length):
            texts = {
                (*t, x): p * q for t, p in texts.items() for x in range(VOCAB) if (q := self.target(t).probability(x))
            }
        return texts


# A shape says what the children of each node are: "d" one that is drawn, "t" the likeliest token of the draft that is
# no elder sibling (it depends on them), "0" to "2" that token; behind each its own children.
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
    tokens, parents, laws, waiting = [], [], [], [((), -1, shape)]
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
                token = draw(rest, Uniform(way))
            elif how == "t":
                token = max((x for x in range(VOCAB) if x not in elder), key=drawn_from.probability)
            else:
                token = int(how)
                if token in elder:
                    continue
            elder.append(token)
            laws.append(drawn_from if how == "d" else None)
            tokens.append(token)
            parents.append(parent)
            waiting.append(((*text, token), len(tokens) - 1, below))
    return in_order(tokens, parents, laws)


def in_order(tokens, parents, laws):
    """The chain of first children in front, as a proposal has it."""
    chain, place = [], -1
    while place in parents:
        place = parents.index(place)
        chain.append(place)
    order = chain + [i for i in range(len(tokens)) if i not in chain]
    place_of = {-1: -1, **{old: new for new, old in enumerate(order)}}
    branches = tuple(Branch(tokens[i], place_of[parents[i]], laws[i]) for i in order[len(chain) :])
    return Proposal([tokens[i] for i in chain], [laws[i] for i in chain], branches=branches)


def run_round(models, rule, shape, way):
    """Nodes and parents, the verdict, and the tokens of one round."""
    proposal = grow(models, way, shape)
    nodes, parents = proposal.nodes, proposal.parents
    asked = []

    def target(place):
        asked.append(place)
        return models.target(tuple(nodes[i] for i in proposal.path_to(place)))

    verdict = rule(nodes, parents, laws_of(proposal), target, WholeDraws(way))
    assert len(set(asked)) == len(asked)
    path = path_of(verdict)
    assert len(path) == verdict.accepted
    assert list(path) == (proposal.path_to(path[-1]) if path else [])
    assert verdict.is_bonus == ((path[-1] if path else -1) not in parents)
    return tuple(nodes), verdict, (*[nodes[i] for i in path], verdict.next_token)


def error(models, rule, shape, length=4):
    """Largest difference of the law of a text that begins with a round."""
    found, expected = Counter(), models.texts(length)
    rounds = law(lambda way: run_round(models, rule, shape, way)[2])
    for tokens, weight in rounds.items():
        begun = 1.0
        for j, token in enumerate(tokens):
            begun *= models.target(tokens[:j]).probability(token)
        if not begun:
            found[tokens] += weight  # nothing that the target gives
            continue
        for text, p in expected.items():
            if text[: len(tokens)] == tokens:
                found[text] += weight * p / begun
    return max(abs(found[text] - expected.get(text, 0.0)) for text in {*found, *expected})


def accepted(models, rule, shape):
    rounds = law(lambda way: run_round(models, rule, shape, way)[1])
    return sum(weight * verdict.accepted for verdict, weight in rounds.items())


KINDS = [{}, {"sparse": True}, {"kind": "same"}, {"kind": "disjoint"}, {"kind": "disjoint", "sparse": True}]


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
@pytest.mark.parametrize("models", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_leaves_the_law_of_the_text_as_it_is(shape, models, rule):
    for seed in range(1 if shape in ("full", "wide and deep") else 2):
        assert error(Models(seed, **models), rule, SHAPES[shape]) < 1e-12


@pytest.mark.parametrize("models", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_as_a_whole_keeps_no_fewer_tokens_in_the_mean(shape, models):
    made = Models(3, **models)
    assert accepted(made, accept_tree_block, SHAPES[shape]) >= accepted(made, accept_tree, SHAPES[shape]) - 1e-12


def test_a_tree_keeps_more_than_its_chain_and_the_whole_more_than_one_by_one():
    gains, whole = [], []
    for seed in range(6):
        made = Models(seed)
        chain = accepted(made, accept_tree, [("d", [("d", [])])])
        small = accepted(made, accept_tree, SHAPES["wide and deep"])
        gains.append(small / chain)
        whole.append(accepted(made, accept_tree_block, SHAPES["wide and deep"]) / small)
    assert min(gains) > 1.03
    assert min(whole) > 1.0
    assert np.mean(whole) > 1.01


def below(text):
    """As many children as the kept tokens say."""
    return [("d", [])] * (1 + sum(text) % 2)


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_a_tree_may_grow_by_what_it_keeps(rule):
    for seed in range(3):
        assert error(Models(seed), rule, [("d", below), ("d", below)]) < 1e-12


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_a_tree_that_drops_what_it_drew_is_noticed(rule):
    """A drawn branch that is left out for its value, as a bound on the whole tree by probability would do it."""

    def dropping(nodes, parents, laws, target, draws):
        kept = [i for i, p in enumerate(parents) if not (i and p < 0 and laws[i].probability(nodes[i]) < 0.3)]
        return rule([nodes[i] for i in kept], [parents[i] for i in kept], [laws[i] for i in kept], target, draws)

    assert max(error(Models(seed), dropping, SHAPES["siblings"]) for seed in range(3)) > 1e-3


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_siblings_that_were_drawn_with_replacement_are_noticed(rule, monkeypatch):
    real = tree.without
    monkeypatch.setattr(tree, "without", lambda law, elder: law)
    assert error(Models(0), rule, SHAPES["siblings"]) > 1e-3
    monkeypatch.setattr(tree, "without", real)
    assert error(Models(0), rule, SHAPES["siblings"]) < 1e-12


@pytest.mark.parametrize("name", TREE_RULES)
@pytest.mark.parametrize("kind", ["other", "same", "disjoint"])
def test_a_drawn_chain_is_accepted_by_the_same_numbers_as_a_chain(name, kind):
    for seed in range(400):
        made, rng = Models(seed % 7, kind), np.random.default_rng(seed)
        tokens, laws = [], []
        for _ in range(seed % 5):
            laws.append(made.draft(tuple(tokens)))
            tokens.append(laws[-1].draw(rng.random()))
        ours, theirs = [RoundDraws(RandomStream(seed), fresh=True) for _ in range(2)]
        calls, expected_calls = [], []

        def target(place, calls=calls, made=made, tokens=tokens):
            calls.append(place + 1)
            return made.target(tuple(tokens[: place + 1]))

        def expected_target(j, calls=expected_calls, made=made, tokens=tokens):
            calls.append(j)
            return made.target(tuple(tokens[:j]))

        verdict = TREE_RULES[name](tokens, range(-1, len(tokens) - 1), laws, target, ours)
        assert verdict == RULES[name](tokens, laws, expected_target, theirs)
        assert calls == expected_calls  # no row is processed that a chain leaves alone


@pytest.mark.parametrize("name", TREE_RULES)
def test_a_tree_without_draws_gives_the_tokens_of_plain_decoding(name):
    """The same numbers give the same text, whatever was copied."""
    for fresh in (False, True):
        for seed in range(60):
            made, rng = Models(seed % 5), np.random.default_rng(seed)
            plain, stream, copied = [], RandomStream(seed), RoundDraws(RandomStream(seed), fresh=fresh)
            for position in range(12):
                plain.append(made.target(tuple(plain)).draw(stream.draws(position).resample))
            text = []
            while len(text) < 12:
                nodes, parents = random_tree(rng)
                proposal = in_order(nodes, parents, [None] * len(nodes))

                def target(place, proposal=proposal, text=text, made=made):
                    return made.target((*text, *[proposal.nodes[i] for i in proposal.path_to(place)]))

                verdict = TREE_RULES[name](proposal.nodes, proposal.parents, None, target, copied)
                text += [proposal.nodes[i] for i in path_of(verdict)] + [verdict.next_token]
                copied.end_round(verdict.accepted + 1)
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
        path = path_of(verdict)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", TREE_RULES)
@pytest.mark.parametrize("how", ["drawn", "mixed", "by probability"])
def test_texts_of_many_rounds_have_the_target_s_law(name, how):
    """With real random numbers, and trees that grow where they are likely: what is grown ends rounds."""
    made, counts = Models(11), Counter()
    for seed in range(4000):
        draws, text = RoundDraws(RandomStream(seed), fresh=True), ()
        while len(text) < 4:
            proposal = drawn_tree(made, text, draws, how)

            def target(place, proposal=proposal, text=text):
                return made.target((*text, *[proposal.nodes[i] for i in proposal.path_to(place)]))

            verdict = TREE_RULES[name](proposal.nodes, proposal.parents, laws_of(proposal), target, draws)
            text += (*[proposal.nodes[i] for i in path_of(verdict)], verdict.next_token)
            draws.end_round(verdict.accepted + 1)
        counts[text[:4]] += 1
    assert p_value(counts, made.texts(4)) > P_VALUE


def drawn_tree(made, text, draws, how):
    """Two children of the text, and two of whichever nodes are likeliest, until there are eight."""
    nodes, parents, laws, chances = [], [], [], {-1: 1.0}
    paths, number = {-1: ()}, 0
    while len(nodes) < 8 and chances:
        place = max(chances, key=chances.__getitem__) if how == "by probability" else min(chances)
        reached, elder = chances.pop(place), []
        drawn_from = made.draft((*text, *paths[place]))
        for index in range(2):
            rest = without(drawn_from, elder)
            in_chain = not index and place == len(paths[place]) - 1
            uniform = draws(len(paths[place])).draft if in_chain else draws.branch(number).draft
            number += not in_chain
            is_drawn = how != "mixed" or (index + len(paths[place])) % 2 == 0
            token = rest.draw(uniform) if is_drawn else int(rest.probs.argmax())
            elder.append(token)
            nodes.append(token)
            parents.append(place)
            laws.append(drawn_from if is_drawn else None)
            paths[len(nodes) - 1] = (*paths[place], token)
            chances[len(nodes) - 1] = reached * drawn_from.probability(token)
    return in_order(nodes, parents, laws)


def test_the_numbers_of_branches_are_their_own():
    stream, draws = RandomStream(5), RoundDraws(RandomStream(5), fresh=True)
    places = [stream.draws(p) for p in range(300)]
    branches = [stream.branch(p, n) for p in range(6) for n in (0, 1, 63, 64, 65, 1000)]
    assert len({number for each in places + branches for number in each}) == 3 * (len(places) + len(branches))
    assert [stream.draws(p) for p in range(300)] == places
    assert [RandomStream(5).branch(p, n) for p in range(6) for n in (0, 1, 63, 64, 65, 1000)] == branches
    assert draws.branch(3) == stream.branch(0, 3)
    assert draws(1) == places[1]
    draws.end_round(1)
    assert draws.branch(3) == stream.branch(2, 3)


def test_branch_numbers_are_uniform_and_independent():
    values = np.array([RandomStream(seed).branch(seed % 3, n) for seed in range(400) for n in range(50)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    for column in values.T:
        counts = np.histogram(column, bins=20, range=(0, 1))[0]
        assert ((counts - len(column) / 20) ** 2 / (len(column) / 20)).sum() < 45
    assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.025
    following = values.reshape(400, 50, 3)
    assert abs(np.corrcoef(following[:, :-1, 0].ravel(), following[:, 1:, 0].ravel())[0, 1]) < 0.025


def test_what_is_left_for_a_sibling():
    dense, sparse = (
        Distribution(None, np.array([0.5, 0.25, 0.25])),
        Distribution(np.array([2, 7]), np.array([0.2, 0.8])),
    )
    assert without(dense, [0, 9]).probs.tolist() == [0.0, 0.5, 0.5]
    assert without(sparse, [7, 3]).probability(2) == 1.0
    assert dense.probs.tolist() == [0.5, 0.25, 0.25]
    with pytest.raises(CheckFailedError, match="3 tokens in one place"):
        without(sparse, [2, 7])
    laws = [dense, dense, sparse]
    with pytest.raises(CheckFailedError, match="in its own draft distribution"):
        accept_tree(
            [0, 1, 5],
            [-1, -1, -1],
            laws,
            lambda _: Distribution(None, np.eye(9)[8]),
            RoundDraws(RandomStream(0), fresh=True),
        )
