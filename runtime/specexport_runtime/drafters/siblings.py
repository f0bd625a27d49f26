"""The other likely tokens beside one of a model's draft: tests of the target that cost the draft no step.

How many there may be is decided before anything is drafted. Of greedy drafts the best are kept then, by how likely the
model takes them to be; what is drawn stays.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from specexport_runtime.executors.base import Float32Array
from specexport_runtime.requests.records import Branch
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.device import to_host
from specexport_runtime.sampling.distribution import Distribution, sample_token
from specexport_runtime.sampling.tree import without

MAX_OFFERED = 16
"""Most branches of a draft of which a controller tests those that pay."""
MAX_SIBLINGS = 8
"""Most branches beside one token of a draft."""
MIN_RATIO = 0.02
"""A greedy draft has no branch that its model takes to be less likely, beside the token that it drafts."""


def choose_default_siblings(request: Request, depth: int) -> tuple[int, ...]:
    """Branches beside each of up to ``depth`` tokens of a draft where no controller chooses; empty for a chain.

    With a draw for each they stand where the text most likely comes to and leaves the chain, by what became of the
    request's earlier drafts: if a token passes with probability a, the n-th sibling beside token k is worth a^k times
    (1 - a/2)^n, where each sibling takes half as much of what is left as a token of the chain.
    """
    room = min(request.tree_size - depth, MAX_SIBLINGS * depth)
    if room <= 0:
        return ()
    if request.sampler.is_greedy:
        return (min(room, MAX_SIBLINGS),) * depth
    stats = request.stats
    passes = (stats.accepted + 2) / (stats.accepted + stats.draft_rounds + 3)
    worth = np.outer(passes ** np.arange(depth), (1.0 - passes / 2) ** np.arange(MAX_SIBLINGS))
    best = np.argsort(-worth, axis=None, kind="stable")[:room] // MAX_SIBLINGS
    return tuple(np.bincount(best, minlength=depth).tolist())


def draw_siblings(distribution: Distribution, token: int, uniforms: Sequence[float]) -> list[int]:
    """Tokens that are drawn in turn from a distribution without ``token`` and those before: fewer if it has no more."""
    here, drawn = to_host(distribution), [token]
    for uniform in uniforms[: int(np.count_nonzero(here.probs)) - 1]:
        drawn.append(sample_token(without(here, drawn), uniform))
    return drawn[1:]


def find_runners_up(logits: Float32Array, token: int, count: int) -> list[tuple[int, float]]:
    """Up to ``count`` tokens beside the likeliest one, the best first, and how likely each is beside it.

    ``logits`` are changed meanwhile: a row is as long as the vocabulary, and to sort it, or copy it, takes longer.
    """
    if not logits.flags.writeable:
        logits = logits.copy()
    masked, found = [(token, logits[token])], list[tuple[int, float]]()
    peak = float(logits[token])
    while len(found) < count and math.isfinite(peak):
        logits[masked[-1][0]] = -math.inf
        best = int(logits.argmax())
        masked.append((best, logits[best]))
        ratio = math.exp(float(logits[best]) - peak)
        if ratio < MIN_RATIO:
            break
        found.append((best, ratio))
    for best, logit in masked:
        logits[best] = logit
    return found


def combine_branches(branches: Sequence[Branch], tokens: Sequence[int], room: int) -> tuple[Branch, ...]:
    """The likeliest ``room`` ways beside a draft whose places know nothing of each other, by cumulative probability."""
    ways: list[list[tuple[int, float]]] = [[(token, 1.0)] for token in tokens]
    for branch in branches:
        ways[branch.parent + 1].append((branch.token, branch.ratio or 0.0))
    shares = [1.0 / sum([ratio for _, ratio in each]) for each in ways]
    reached, waiting, found = 1.0, list[tuple[float, int, int, int, float]](), list[Branch]()
    for depth, (each, share) in enumerate(zip(ways, shares, strict=True)):
        waiting += [(-reached * share * ratio, depth, token, depth - 1, ratio) for token, ratio in each[1:]]
        reached *= share
    heapify(waiting)
    while waiting and len(found) < room:
        chance, depth, token, parent, ratio = heappop(waiting)
        place = len(tokens) + len(found)
        found.append(Branch(token, parent, ratio=ratio))
        if depth + 1 < len(ways):
            for follower, beside in ways[depth + 1]:
                heappush(waiting, (chance * shares[depth + 1] * beside, depth + 1, follower, place, beside))
    return tuple(found)


def path_chances(branches: Sequence[Branch], depth: int) -> list[float]:
    """How likely the model takes each path to a leaf beside one of ``depth`` tokens; only siblings count."""
    totals = [1.0] * depth
    for branch in branches:
        totals[branch.parent + 1] += branch.ratio or 0.0
    reached, chances = 1.0, []
    for total in totals:
        chances.append(reached / total)
        reached /= total
    return [chances[branch.parent + 1] * (branch.ratio or 0.0) for branch in branches]
