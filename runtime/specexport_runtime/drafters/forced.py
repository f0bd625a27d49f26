"""What a grammar does to drafts: it begins them, cuts them, and goes on after them.

Where it leaves one way to go on, tokens are known without a guess: draft tokens like any other, tested against the
masked distribution, in which each is the only one. So the distribution is exact, and a step is saved for each.

What goes wrong in a grammar after drafts ends these: it comes up again where the text comes there.
"""

from collections.abc import Callable, Sequence

from specexport_runtime.requests.records import FORCED, Branch, DraftEnd, DraftPrefix, Proposal
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.grammar import TokenRules


class BegunDrafts:
    """The drafts of a round with grammars, of at most ``rooms`` tokens."""

    def __init__(self, requests: Sequence[Request], rooms: Sequence[int]) -> None:
        self._sequences = requests
        self.drafts: list[DraftPrefix] = []  # empty where no grammar forces anything, or the request does not draft
        for req, most in zip(requests, rooms, strict=True):
            room, grammar = min(most, req.max_lookahead), req.sampler.grammar
            tokens: list[int] = []
            if grammar is not None:
                try:
                    tokens = grammar.forced(room)
                except Exception:  # whatever it is
                    room = 0
            self.drafts.append(DraftPrefix(tokens, room))

    @property
    def rooms(self) -> list[int]:
        """Most tokens that may be added to each."""
        return [each.room - len(each.tokens) for each in self.drafts]

    def alone(self) -> list[Proposal]:
        """The drafts if no drafter adds anything."""
        return [_alone(each) for each in self.drafts]

    def fit(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Drafts up to where a grammar or the room ends; a refused token that was drawn stays last, and is tested."""
        return [self._apply_grammar(i, proposal, _fit) for i, proposal in enumerate(proposals)]

    def extend(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Drafts, and after each what the grammar of its request forces."""
        return [self._apply_grammar(i, proposal, _extend) for i, proposal in enumerate(proposals)]

    def _apply_grammar(
        self, i: int, proposal: Proposal, change: Callable[[TokenRules, Proposal, int], Proposal]
    ) -> Proposal:
        grammar = self._sequences[i].sampler.grammar
        if grammar is None or not proposal.tokens:
            return proposal
        try:
            return change(grammar, proposal, self.drafts[i].room)
        except Exception:  # whatever it is
            return proposal


def begin_drafts(requests: Sequence[Request], rooms: Sequence[int]) -> BegunDrafts | None:
    """The drafts of a round; None if no request has a grammar. See :class:`BegunDrafts`."""
    if all(req.sampler.grammar is None for req in requests):
        return None
    return BegunDrafts(requests, rooms)


def shorten(proposal: Proposal, count: int, end: DraftEnd) -> Proposal:
    """The first ``count`` tokens of a draft; nothing if none of them is the drafter's own."""
    forced = tuple(place for place in proposal.forced if place < count)
    if count == len(forced):
        return proposal._replace(tokens=[], distributions=None, end="none", forced=(), branches=())
    drawn_from = proposal.distributions
    return proposal._replace(
        tokens=proposal.tokens[:count],
        distributions=None if drawn_from is None else drawn_from[:count],
        end=end,
        forced=forced,
        branches=list_branches_after_cut(proposal, count),
    )


def list_branches_after_cut(proposal: Proposal, count: int) -> tuple[Branch, ...]:
    """The branches of a draft that gets a chain of ``count`` tokens: those beside one that is left, or after all."""
    chain, places, kept = len(proposal.tokens), dict[int, int](), list[Branch]()
    known = count - 1 if count < chain else chain
    for place, branch in enumerate(proposal.branches, start=chain):
        parent = branch.parent if branch.parent < known else places.get(branch.parent)
        if parent is not None:
            places[place] = count + len(kept)
            kept.append(branch._replace(parent=parent))
    return tuple(kept)


def _alone(begun: DraftPrefix) -> Proposal:
    count = len(begun.tokens)
    if not count:
        return Proposal([], end="none")
    end: DraftEnd = "lookahead" if count == begun.room else "text"
    return Proposal(begun.tokens, None, end, FORCED, forced=tuple(range(count)))


def _fit(grammar: TokenRules, proposal: Proposal, room: int) -> Proposal:
    count, drawn_from = grammar.cut(proposal.tokens[:room]), proposal.distributions
    if count < room and drawn_from is not None and any(each is not None for each in drawn_from[count : count + 1]):
        count += 1
    return proposal if count == len(proposal.tokens) else shorten(proposal, count, "text")


def _extend(grammar: TokenRules, proposal: Proposal, room: int) -> Proposal:
    count = len(proposal.tokens)
    tokens = grammar.forced(room - count, proposal.tokens) if grammar.cut(proposal.tokens) == count else []
    if not tokens:
        return proposal
    drawn_from = proposal.distributions
    return proposal._replace(
        tokens=[*proposal.tokens, *tokens],
        distributions=None if drawn_from is None else [*drawn_from, *[None] * len(tokens)],
        forced=(*proposal.forced, *range(count, count + len(tokens))),
        branches=list_branches_after_cut(proposal, count + len(tokens)),
    )
