"""Acceptance of a draft that is a tree: a token may be one of several that are tested in the same place.

- One by one: recursive rejection without replacement (Jeon et al. 2024, "Recursive Speculative Decoding").
- As a whole: traversal verification (2025, arXiv:2505.12398), which is block verification on a chain. A likely leaf can
  save the unlikely nodes in front of it.
- Of children that were not drawn one draw decides, from what those that were have left of the target: it is one of
  them, or what the text goes on with.

Either leaves the text the target's distribution, if the tree has grown as follows. Siblings are drawn in order from the
distribution that they name, each without its elder siblings (:func:`without`); one that is not drawn (distribution
None) may depend on the text in front of it and on its elder siblings. Whether a node gets one more child may depend on
what was drawn elsewhere, but never on that child: a token that was drawn stays. The numbers of a tree serve one round
(``RoundDraws``).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.sampling.accept import Verdict, draft_probability, normalised, residual
from specexport_runtime.sampling.device import to_host
from specexport_runtime.sampling.distribution import Distribution, HostDistribution, sample_token
from specexport_runtime.sampling.rng import RoundDraws


def accept_tree_greedy(nodes: Sequence[int], parents: Sequence[int], greedy: Callable[[int], int]) -> Verdict:
    """Follow the target's greedy tokens through the tree; ``greedy(place)`` is the one after a node, -1: the text."""
    tree = _Tree(nodes, parents)
    place = -1
    while True:
        token = greedy(place)
        child = tree.child(place, token)
        if child is None:
            return tree.verdict(place, token)
        place = child


def accept_tree(
    nodes: Sequence[int],  # tokens: the chain's, then those of branches, each after its parent; siblings differ
    parents: Sequence[int],  # place of the node before each; -1 after the text
    draft_distributions: Sequence[Distribution | None] | None,  # of siblings; None, for all or one: not drawn
    # After a node, -1: the text; called at most once for each, parents first.
    target_distribution: Callable[[int], Distribution],
    draws: RoundDraws,
) -> Verdict:
    """Test siblings one by one and descend to the first that passes; where none does, what they left is drawn."""
    tree = _DrawnTree(nodes, parents, draft_distributions, draws)
    place = -1
    while True:
        child, distribution = _first_passing(tree, place, to_host(target_distribution(place)))
        if child is None:
            token = tree.draw(place, distribution)
            child = tree.child(place, token)
            if child is None:
                return tree.verdict(place, token)
        place = child


def accept_tree_block(
    nodes: Sequence[int],
    parents: Sequence[int],
    draft_distributions: Sequence[Distribution | None] | None,
    target_distribution: Callable[[int], Distribution],  # as for ``accept_tree``; after nodes that are not kept too
    draws: RoundDraws,
) -> Verdict:
    """Test leaves first, and a node where nothing after it passed: never fewer tokens in the mean than one by one.

    A node of which r is the chance that it or one after it stays passes on r p(x)/q(x), at most 1, to its first child
    x. If nothing there stays, the next child meets p and r as x leaves them: the positive part of r p - q, and its mass
    m over m + 1 - r. Of children that were not drawn the one that is then drawn from p, if any, has r as it is. Where
    nothing was drawn the rule is ``accept_tree``. CheckFailedError: as there.
    """
    tree = _DrawnTree(nodes, parents, draft_distributions, draws)
    # The text itself always passes.
    return tree.verdict(*cast("tuple[int, int]", _verify_subtree(tree, -1, 1.0, target_distribution)))


TREE_RULES = {"block": accept_tree_block, "token": accept_tree}
"""How sampled trees are accepted, by the names of ``sampling.block.RULES``."""


def without(distribution: Distribution, tokens: Sequence[int]) -> HostDistribution:
    """The next sibling's distribution: without its elders; CheckFailedError if they have all its mass."""
    ids, probs = to_host(distribution)
    rest = probs.copy()
    if ids is None:
        rest[[token for token in tokens if token < len(rest)]] = 0.0
    else:
        rest[np.isin(ids, tokens)] = 0.0
    total = rest.sum()
    if not total > 0.0:
        raise CheckFailedError(
            f"A draft has {len(tokens) + 1} tokens in one place, and its distribution fewer.",
            hint="the drafter must draw no more siblings than tokens are possible.",
        )
    return HostDistribution(ids, rest / total)


class _Tree:
    """A draft, with its text at place -1."""

    def __init__(self, nodes: Sequence[int], parents: Sequence[int]) -> None:
        self.nodes, self._parents = nodes, parents
        self.children: dict[int, list[int]] = {}
        self.depths = {-1: 0}  # tokens from the text up to a node
        for place, parent in enumerate(parents):
            self.children.setdefault(parent, []).append(place)
            self.depths[place] = self.depths[parent] + 1

    def child(self, place: int, token: int) -> int | None:
        return next((child for child in self.children.get(place, ()) if self.nodes[child] == token), None)

    def verdict(self, place: int, token: int) -> Verdict:
        """The path to a node stays, and ``token`` comes after it."""
        path, is_bonus = [], place not in self.children
        while place >= 0:
            path.append(place)
            place = self._parents[place]
        path.reverse()
        in_chain = not path or path[-1] == len(path) - 1
        return Verdict(len(path), int(token), is_bonus, None if in_chain else tuple(path))


class _DrawnTree(_Tree):
    """A tree with what it was drawn from, and the numbers that it is tested with."""

    def __init__(
        self,
        nodes: Sequence[int],
        parents: Sequence[int],
        distributions: Sequence[Distribution | None] | None,
        draws: RoundDraws,
    ) -> None:
        super().__init__(nodes, parents)
        self._distributions, self._draws = distributions, draws

    def distribution(self, place: int) -> Distribution | None:
        return None if self._distributions is None else self._distributions[place]

    def is_drawn(self, place: int) -> bool:
        """Whether all of a node's children were drawn."""
        return all(self.distribution(child) is not None for child in self.children.get(place, ()))

    def drawn(self, place: int) -> Iterator[tuple[int, Distribution]]:
        """A node's children that were drawn, and what each was drawn from in its turn."""
        elder: list[int] = []
        for child in self.children.get(place, ()):
            distribution = self.distribution(child)
            if distribution is not None:
                yield child, without(distribution, elder) if elder else distribution
            elder.append(self.nodes[child])

    def uniform(self, place: int) -> float:
        """The number that a node is tested with."""
        in_chain = self.depths[place] == place + 1
        return (self._draws(place) if in_chain else self._draws.branch(place)).accept

    def draw(self, place: int, distribution: Distribution) -> int:
        """What comes after a node if the text ends its path there."""
        return sample_token(distribution, self._draws(self.depths[place]).resample)


def _first_passing(tree: _DrawnTree, place: int, distribution: HostDistribution) -> tuple[int | None, HostDistribution]:
    """The first child that was drawn and passes; else None, and the target's distribution when all were refused."""
    for child, draft in tree.drawn(place):
        token = tree.nodes[child]
        if tree.uniform(child) * draft_probability(draft, token, child) < distribution.probability(token):
            return child, distribution
        distribution = _compute_remainder(distribution, draft, 1.0)[0]
    return None, distribution


def _verify_subtree(
    tree: _DrawnTree, place: int, chance: float, target_distribution: Callable[[int], Distribution]
) -> tuple[int, int] | None:
    """The last node that passes on the first path that has one, of a node with a ``chance`` and all after it.

    After it comes the token. A path ends where only a draft comes to, and there is no distribution.
    """
    if not _may_pass(tree, place, chance):
        return None
    try:
        distribution = to_host(target_distribution(place))
    except (CheckFailedError, InvalidRequestError):
        if place >= 0 and not tree.uniform(place) < chance:
            return None
        raise
    for child, draft in tree.drawn(place):
        token = tree.nodes[child]
        passed_on = min(1.0, chance * distribution.probability(token) / draft_probability(draft, token, child))
        found = _verify_subtree(tree, child, passed_on, target_distribution) if passed_on > 0.0 else None
        if found is not None:
            return found
        distribution, mass = _compute_remainder(distribution, draft, chance)
        if chance < 1.0:
            chance = mass / (mass + 1.0 - chance)
            if not chance > 0.0:
                break
    passes = place < 0 or tree.uniform(place) < chance
    if not passes and tree.is_drawn(place):
        return None
    token = tree.draw(place, distribution)
    following = tree.child(place, token)
    if following is not None:
        return _verify_subtree(tree, following, chance, target_distribution)
    return (place, token) if passes else None


def _compute_remainder(
    distribution: HostDistribution, draft: Distribution, weight: float
) -> tuple[HostDistribution, float]:
    """What a refused token leaves of the target's distribution, and the mass of that."""
    masses = residual(distribution, draft, weight)
    mass = float(masses.sum())
    return to_host(cast("Distribution", normalised(distribution, masses))), mass


def _may_pass(tree: _DrawnTree, place: int, chance: float) -> bool:
    """Whether a node passes, or one after it, if the target is sure of all that follows; else it matters nowhere."""
    if place < 0 or tree.uniform(place) < chance:
        return True
    for child in tree.children.get(place, ()):
        # Without its elder siblings it is as probable, or more.
        distribution = tree.distribution(child)
        probability = 1.0 if distribution is None else draft_probability(distribution, tree.nodes[child], child)
        if _may_pass(tree, child, min(1.0, chance / probability)):
            return True
    return False
