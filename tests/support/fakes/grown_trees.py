"""Drafters whose drafts have branches beside them, some right and some wrong, some of them deeper than a sibling."""

import random
from collections.abc import Sequence
from typing import Any

from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.records import Branch, Proposal
from specexport_runtime.requests.request import Request


def grown(proposal: Proposal, text: Sequence[int], target: FakeExecutor, *, right: float, most: int) -> Proposal:
    """A draft with up to ``most`` branches, of the text alone; ``right`` of them are the target's likeliest."""
    nodes, parents = list(proposal.tokens), list(range(-1, len(proposal.tokens) - 1))
    branches: list[Branch] = []
    if not nodes or proposal.error is not None:
        return proposal
    chance = random.Random(len(text))
    for _ in range(most):
        parent = chance.randrange(-1, len(nodes))
        if parent == len(proposal.tokens) - 1:
            continue  # the chain may go on after it, and siblings stand after its token
        path, place = list[int](), parent
        while place >= 0:
            path, place = [nodes[place], *path], parents[place]
        taken = {nodes[child] for child, mother in enumerate(parents) if mother == parent}
        likeliest = int(target.logits_after([*text, *path]).argmax())
        token = likeliest if chance.random() < right else chance.randrange(target.vocab_size)
        if token not in taken:
            nodes.append(token)
            parents.append(parent)
            branches.append(Branch(token, parent))
    return proposal._replace(branches=tuple(branches))


class GrowingDrafter(ChainDrafter):
    target: FakeExecutor
    right, most = 0.6, 6

    def propose(self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Any = None) -> list[Proposal]:
        proposals = super().propose(requests, lookaheads, begun)
        return [
            grown(proposal, req.tokens, self.target, right=self.right, most=self.most)
            for req, proposal in zip(requests, proposals, strict=True)
        ]


def let_trees_grow(decoder: Any, target: FakeExecutor, *, right: float = 0.6, most: int = 6) -> None:
    """Give all drafts of a decoder branches, which its target verifies from now on."""
    target.takes_trees = True
    made = decoder.drafter
    decoder.drafter = GrowingDrafter(made.drafters, made.lengths)
    decoder.drafter.target, decoder.drafter.right, decoder.drafter.most = target, right, most
