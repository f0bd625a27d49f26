"""Acceptance rules by enumeration and by chosen numbers."""

from collections import Counter

from specexport_runtime.sampling.rng import Draws


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
    """A uniform of which is known what comparisons told: each goes either way as often as it would."""

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
        assert (self.low, self.high) == (0.0, 1.0)
        self.high = 0.0
        return self.way.choose(probs)


def draw(distribution, uniform):
    ids = range(len(distribution.probs)) if distribution.token_ids is None else distribution.token_ids.tolist()
    return ids[uniform.choose((distribution.probs / distribution.probs.sum()).tolist())]


def law(run):
    """Probability of each thing that ``run(way)`` returns."""
    found, waiting = Counter(), [()]
    while waiting:
        way = Way(waiting.pop())
        found[run(way)] += way.weight
        waiting += way.others
    assert abs(sum(found.values()) - 1) < 1e-12
    return found


class WholeDraws:
    """The numbers of a round, each integrated: one object for each place and each branch."""

    def __init__(self, way):
        self._way, self._places, self._branches = way, {}, {}

    def __call__(self, place):
        return self._places.setdefault(place, self._new())

    def branch(self, number):
        return self._branches.setdefault(number, self._new())

    def _new(self):
        return Draws(*[Uniform(self._way) for _ in range(3)])


def laws_of(proposal):
    return [*proposal.distributions, *[branch.law for branch in proposal.branches]]


def path_of(verdict):
    return tuple(range(verdict.accepted)) if verdict.path is None else verdict.path
