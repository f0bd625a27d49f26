"""Acceptance rules by enumeration and by chosen numbers."""

from collections import Counter
from functools import cache
from itertools import accumulate
from math import prod

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.distribution import HostDistribution, one_hot
from specexport_runtime.sampling.rng import Draws
from tests.support.references.exact import joint


class Way:
    """One way that a run goes: what it chooses, and how likely that is."""

    def __init__(self, decisions):
        self.decisions, self.taken, self.weight, self.others = decisions, (), 1.0, []

    def choose(self, probs):
        options = [i for i, p in enumerate(probs) if p > 0]
        if len(self.taken) < len(self.decisions):
            pick = self.decisions[len(self.taken)]
        else:
            pick, *rest = options
            self.others += [(*self.taken, other) for other in rest]
        self.taken += (pick,)
        self.weight *= probs[pick]
        return pick


class Uniform:
    """A uniform of which is known what comparisons and draws told: each goes every way as often as it would."""

    def __init__(self, way):
        self.way, self.low, self.high, self.scale = way, 0.0, 1.0, 1.0

    def __mul__(self, scale):
        self.scale = scale
        return self

    def __lt__(self, bound):
        at, self.scale = min(max(bound / self.scale, self.low), self.high), 1.0
        share = (at - self.low) / (self.high - self.low)
        below = bool(self.way.choose([1.0 - share, share]))
        self.low, self.high = (self.low, at) if below else (at, self.high)
        return below

    def __ge__(self, bound):
        return not self < bound

    def choose(self, probs):
        """The place of the inverse cumulative distribution; what is drawn with it again knows of it."""
        edges = [0.0, *accumulate(probs)]
        lows, highs = [max(self.low, edge) for edge in edges[:-1]], [min(self.high, edge) for edge in edges[1:]]
        shares = [max(high - low, 0.0) for low, high in zip(lows, highs, strict=True)]
        shares = [share if share > 1e-15 else 0.0 for share in shares]
        pick = self.way.choose([share / sum(shares) for share in shares])
        self.low, self.high = lows[pick], highs[pick]
        return pick


def draw(distribution, uniform):
    ids = range(len(distribution.probs)) if distribution.token_ids is None else distribution.token_ids.tolist()
    return ids[uniform.choose((distribution.probs / distribution.probs.sum()).tolist())]


def integrate(monkeypatch, *modules):
    """Let modules draw with integrated numbers too."""
    for module in modules:
        drawn = module.sample_token
        monkeypatch.setattr(
            module, "sample_token", lambda d, u, drawn=drawn: draw(d, u) if isinstance(u, Uniform) else drawn(d, u)
        )


class Models:
    """A target and a draft (``other``, ``same``, ``disjoint``) of three tokens, which depend on all tokens so far."""

    VOCAB = 3

    def __init__(self, seed, kind="other", *, sparse=False):
        self.kind, self.sparse = kind, sparse
        self.target = cache(lambda text: self._distribution(seed, 0, text))
        self.draft = cache(lambda text: self._distribution(seed, 0 if kind == "same" else 1, text))

    def _distribution(self, seed, model, text):
        probs = np.random.default_rng([seed, model, len(text), *text]).dirichlet(np.full(self.VOCAB, 0.7))
        if self.kind == "disjoint":
            probs[2 * model] = 0.0
            probs /= probs.sum()
        ids = np.flatnonzero(probs)
        return HostDistribution(ids, probs[ids]) if self.sparse else HostDistribution(None, probs)


def error(rounds, target, length, vocab=3):
    """Largest difference of the distribution of a text that begins with a round of these tokens and chances."""
    found, expected = Counter(), joint(target, length, vocab)
    for tokens, weight in rounds.items():
        begun = prod(target(tokens[:j]).probability(token) for j, token in enumerate(tokens))
        if not begun:
            found[tokens] += weight  # nothing that the target gives
            continue
        for text, p in expected.items():
            if text[: len(tokens)] == tokens:
                found[text] += weight * p / begun
    return max(abs(found[text] - expected.get(text, 0.0)) for text in {*found, *expected})


def distribution(run):
    found, waiting = Counter(), [()]
    while waiting:
        way = Way(waiting.pop())
        found[run(way)] += way.weight
        waiting += way.others
    assert abs(sum(found.values()) - 1) < 1e-12
    return found


class NoDistributionError(InvalidRequestError):
    def __init__(self, text):
        super().__init__("no token is possible.")
        self.text = text


NO_DISTRIBUTION = Models.VOCAB
"""Stands for an error in a text."""


def with_dead_ends(target):
    """The target without a distribution after token 1; and a distribution that says so."""

    def distribution(text):
        if text[-1:] == (1,):
            raise NoDistributionError(text)
        return target(text)

    return (
        distribution,
        lambda text: one_hot(NO_DISTRIBUTION) if text[-1:] in ((1,), (NO_DISTRIBUTION,)) else target(text),
    )


class WholeDraws:
    """The numbers of a round, each integrated: one object for each place and each branch."""

    def __init__(self, way):
        self._way, self._places, self._branches = way, {}, {}

    def __call__(self, place):
        return self._places.setdefault(place, self._new())

    peek = __call__

    def branch(self, number):
        return self._branches.setdefault(number, self._new())

    def _new(self):
        return Draws(*[Uniform(self._way) for _ in range(3)])


def distributions_of(proposal):
    return [*proposal.distributions, *[branch.distribution for branch in proposal.branches]]


def path_of(verdict):
    return tuple(range(verdict.accepted)) if verdict.path is None else verdict.path
