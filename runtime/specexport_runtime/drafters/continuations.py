"""Ways in which a text may go on: where copies differ, the others are branches of the draft."""

from collections.abc import Sequence

from specexport_runtime.requests.records import Branch
from specexport_runtime.requests.request import Request


def count_branch_room(request: Request, chain: int) -> int:
    """Most branches of a copy beside a chain of so many tokens; a controller says it by the siblings that it allows."""
    room = max(request.tree_size - chain, 0)
    return min(sum(request.siblings), room) if request.adaptive else room


class Continuations:
    """A tree of continuations that has the draft's chain in it."""

    def __init__(self, chain: Sequence[int]) -> None:
        self._length = len(chain)
        self._tokens, self._parents = list(chain), list(range(-1, len(chain) - 1))
        self._depths = list(range(len(chain)))
        self._chances = [0.0] * len(chain)
        self._places = {(parent, token): parent + 1 for parent, token in enumerate(chain, start=-1)}

    def add(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """One way to go on, and what it adds to the chance that the text comes to each of its tokens: no later more."""
        parent = -1
        for depth, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            place = self._places.setdefault((parent, token), len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._parents.append(parent)
                self._depths.append(depth)
                self._chances.append(0.0)
            self._chances[place] += chance
            parent = place

    def branches(self, room: int) -> tuple[Branch, ...]:
        """The likeliest tokens beside the chain, or after it, in the order of their chances."""
        others = sorted(
            range(self._length, len(self._tokens)), key=lambda place: (-self._chances[place], self._depths[place])
        )
        likeliest: dict[int, float] = {}
        for parent, chance in zip(self._parents, self._chances, strict=True):
            likeliest[parent] = max(likeliest.get(parent, 0.0), chance)
        kept, found = {place: place for place in range(-1, self._length)}, list[Branch]()
        for place in others[:room]:
            parent, chance = self._parents[place], self._chances[place]
            kept[place] = self._length + len(found)
            found.append(Branch(self._tokens[place], kept[parent], ratio=chance / likeliest[parent]))
        return tuple(found)
