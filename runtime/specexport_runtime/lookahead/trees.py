"""Which branches of drafts are worth a test: each is a token more in the target's step, and no step of the drafter's.

How likely a branch is taken, once the text has come to its parent, is learned from texts. It goes by how likely its
drafter took it to be beside the token that it drafted; of a branch that was drawn, by how many were drawn before it.
Tests go to the branches that are likeliest to be reached and taken, as long as they give the step more tokens a second
(Sequoia's rule, Chen et al. 2024, for the tree that there is).
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.lookahead.acceptance import SharedAcceptance
from specexport_runtime.requests.records import Branch, Proposal

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request

# Recorded drafts have no branches; that these find those that pay is judged by test_adaptive_trees.py.
MAX_BESIDE = 3
"""Branches beside one token that are looked at."""
LOOKED_EVERY = 16
"""Rounds after which branches are looked for where none has paid."""
_MARGIN = 0.01
_RATIOS = (0.03, 0.06, 0.12, 0.2, 0.35, 0.5, 0.7, 1.0)
_MISSES = (0.98, 0.97, 0.94, 0.9, 0.85, 0.8, 0.75, 0.7, 0.4, 0.7, 0.8, 0.9)
"""Before anything was seen: by ratio, the last of which are of what a branch most likely goes on with; then of the
first, second and third that was drawn, if all before it failed."""
_WEIGHT = 4.0


def make_shared_chances() -> SharedAcceptance:
    """What is known of branches of all requests of a drafter."""
    return SharedAcceptance(len(_MISSES), before=(_MISSES, _WEIGHT))


def find_slot(branch: Branch, elder: int = 0) -> int:
    """What a branch's chance goes by; ``elder`` of its siblings were drawn before it, besides the draft's own token."""
    if branch.distribution is None and branch.ratio is not None:
        return bisect_right(_RATIOS, branch.ratio)
    return len(_RATIOS) + 1 + min(elder, MAX_BESIDE - 1)


def best_branch_chance(misses: Sequence[float]) -> float:
    """Chance of the branch beside a token that is likeliest to be taken."""
    return 1.0 - min(misses[: len(_RATIOS)])


class BranchCandidate(NamedTuple):
    """A branch that may be tested."""

    gain: float  # chance that the text comes to it and takes it
    request: int  # its place in the round
    place: int  # among the branches of its draft


def candidates(
    request: int, proposal: Proposal, reach: Sequence[float], misses: Sequence[float]
) -> list[BranchCandidate]:
    """All branches of a draft, whose chain is accepted up to its tokens with the chances ``reach``."""
    chain, found = len(proposal.tokens), list[BranchCandidate]()
    for place, branch in enumerate(proposal.branches):
        parent = branch.parent
        before = 1.0 if parent < 0 else reach[parent] if parent < chain else found[parent - chain].gain
        found.append(BranchCandidate(before * (1.0 - misses[find_slot(branch)]), request, place))
    return found


def compute_token_reach(proposal: Proposal, reach: Sequence[float]) -> list[float]:
    """Chance that each token of a draft is accepted; ``reach`` are those of its own, and a forced one is sure."""
    own, chances, last = iter(reach), list[float](), 1.0
    for place in range(len(proposal.tokens)):
        last = last if place in proposal.forced else next(own, 0.0)
        chances.append(last)
    return chances


def keep_branches(proposal: Proposal, places: Collection[int]) -> Proposal:
    """A draft with some of its branches, whose parents are among them."""
    chain, moved, kept = len(proposal.tokens), dict[int, int](), list[Branch]()
    for place in sorted(places):
        branch = proposal.branches[place]
        moved[chain + place] = chain + len(kept)
        kept.append(branch._replace(parent=moved.get(branch.parent, branch.parent)))
    return proposal._replace(branches=tuple(kept))


def select_worth_testing(
    found: Sequence[BranchCandidate], expected: float, seconds: Sequence[float]
) -> list[BranchCandidate]:
    """Of candidates, those that a step gives most tokens a second with; ``seconds`` of it with 0, 1, … of them."""
    ordered = sorted(found, key=lambda each: (-each.gain, each.request, each.place))
    best, count = (1.0 + _MARGIN) * expected / seconds[0], 0
    for taken, each in enumerate(ordered, 1):
        expected += each.gain
        if (rate := expected / seconds[taken]) > best:
            best, count = rate, taken
    return ordered[:count]


def list_possible_siblings(reach: Sequence[float], misses: Sequence[float]) -> list[tuple[float, int]]:
    """Chance of being taken, and depth, of each sibling that could be drawn beside a chain with the chances ``reach``.

    Those of one depth fall, for each is tested only where all before it failed.
    """
    found = []
    for depth, passed in enumerate(reach):
        left = (reach[depth - 1] if depth else 1.0) - passed
        for elder in range(MAX_BESIDE):
            miss = misses[len(_RATIOS) + 1 + elder]
            found.append((left * (1.0 - miss), depth))
            left *= miss
    return found


def observe(chances: SharedAcceptance, request: "Request", proposal: Proposal, before: int) -> None:
    """Which branches of a draft the text took, of which there were ``before`` tokens; it may not have ended.

    Branches that were not tested count too, if nothing was drawn: that the text came to them is seen without a test.
    """
    nodes, elders = proposal.nodes, dict[int, int]()
    for place, branch in enumerate(proposal.branches, start=len(proposal.tokens)):
        path = [nodes[each] for each in proposal.path_to(place)]
        elder = elders[branch.parent] = elders.get(branch.parent, -1) + 1
        text = request.tokens[before : before + len(path)]
        if len(text) < len(path) or text[:-1] != path[:-1]:
            continue
        slot, taken = find_slot(branch, elder), text[-1] == path[-1]
        if branch.distribution is not None and not taken and text[-1] in _drawn_before(proposal, branch.parent, elder):
            continue  # it was not tested
        chances.observe([slot], int(taken), rejected=not taken)


def _drawn_before(proposal: Proposal, parent: int, elder: int) -> list[int]:
    """The tokens that stand beside the branch after ``elder`` others of its parent's, before it."""
    chain = [proposal.tokens[parent + 1]] if parent + 1 < len(proposal.tokens) else []
    return chain + [branch.token for branch in proposal.branches if branch.parent == parent][:elder]
