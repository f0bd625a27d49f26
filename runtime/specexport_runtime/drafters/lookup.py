"""Lookup drafting: copy what followed the same words before. No draft model, no training.

LLMA (Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large Language Models") copies from a
reference text; prompt lookup copies from the prompt and the output. This drafter does both.

Where the end of a growing text occurred before, a suffix automaton says that also remembers recent places. It says as
well what else followed there: the branches of a draft that may be a tree.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from weakref import WeakKeyDictionary

from specexport_runtime.drafters.base import Drafter, DrafterKind, DrafterTraits
from specexport_runtime.drafters.continuations import Continuations, count_branch_room
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.records import DraftEnd, DraftPrefix, Proposal
from specexport_runtime.requests.request import Request

_MAX_WALK = 64
_HIT_WEIGHT = 0.1
_MAX_WAYS = 4  # tokens that are looked at in one place
_MIN_CHANCE = 0.01  # a place is left in no way that is less likely than this to be taken
_MIN_RATE = 0.1  # matches are taken to foretell neither less than this, nor all but as much

DEFAULT_MATCH_LENGTH = 2
DEFAULT_COPY_LENGTH = 7
"""Match and copy length as EMS-SD uses them with LLMA (Ni et al. 2025)."""

_SEPARATOR = -1  # between reference and prompt; it is no token id and occurs once, so no match can contain it


class SuffixIndex:
    """The longest suffix of a growing token text that occurred before, and where.

    A suffix automaton built token by token (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
    text"). Each state stands for all substrings with the same set of end positions. The link of the newest state leads
    to the longest suffix that also ends somewhere earlier, which is what a lookup asks for: the answer is ready after
    each token, and nothing is ever searched or rescanned.

    States also keep their most recent end position. All suffixes of the text end at its newest token, so each token
    updates the chain of links from its state. In text that chain is short, but in ``a a a a`` it is as long as the
    text, so at most 64 links are followed. The longest match is always exact. The most recent place is exact as long as
    no chain is longer than that (so always in texts of up to 64 tokens); otherwise it is a place where the match
    occurred, but perhaps not the most recent one.

    A token costs amortised constant time. Memory is at most two states a token.
    """

    def __init__(self, min_length: int = 1) -> None:
        self.min_length = max(min_length, 1)  # shortest match that counts in ``hit_rate``
        self.tokens: list[int] = []
        self.match_length = 0  # tokens of the longest suffix that occurred before; 0 if the last token is new
        # ``tokens[match_end]`` followed its most recent earlier occurrence; no meaning without a match.
        self.match_end = 0
        self.hit_rate = 0.5  # moving average (newest 1/10): how often a match of ``min_length`` foretold the next token
        # State 0 is the empty string. For each state: transitions, link, longest string, most recent end position.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._last = [0]
        self._tail = 0

    def extend(self, new_tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in new_tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token to the text."""
        transitions, link, last = self._next, self._link, self._last
        if self.match_length >= self.min_length:
            self.hit_rate += _HIT_WEIGHT * ((self.tokens[self.match_end] == token) - self.hit_rate)
        self.tokens.append(token)
        end = len(self.tokens)
        tail = self._add_state({}, 0, end, end)
        state, self._tail = self._tail, tail
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = tail
            state = link[state]
        if state >= 0:
            link[tail] = self._state_after(state, token)
        state = link[tail]
        self.match_length = self._length[state]
        self.match_end = last[state]
        for _ in range(_MAX_WALK):
            if state <= 0:
                break
            last[state] = end
            state = link[state]

    def match_behind(self, tokens: Sequence[int]) -> tuple[int, int]:
        """``match_length`` and ``match_end`` as if the text went on with ``tokens``; it stays as it is."""
        if not tokens:
            return self.match_length, self.match_end
        state, length = self._find_match(tokens)
        return length, self._last[state]

    def find_continuations(self, tokens: Sequence[int], count: int) -> list[tuple[int, int]]:
        """Up to ``count`` tokens that followed this end before, and where; those of longer, newer matches first."""
        state, length = self._find_match(tokens)
        found: dict[int, int] = {}
        while state > 0 and length >= self.min_length and len(found) < count:
            newest = nlargest(count, [(self._last[target], token) for token, target in self._next[state].items()])
            for place, token in newest:
                found.setdefault(token, place)
            state = self._link[state]
            length = self._length[state]
        return list(found.items())[:count]

    def _find_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The state of the longest match if the text went on with ``tokens``, and the length of the match."""
        state, length = self._link[self._tail], self.match_length
        for token in tokens:
            while state >= 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state] if state >= 0 else 0
            state, length = (self._next[state][token], length + 1) if state >= 0 else (0, 0)
        return state, length

    def _add_state(self, transitions: dict[int, int], link: int, length: int, last: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._last.append(last)
        return len(self._link) - 1

    def _state_after(self, state: int, token: int) -> int:
        """The state whose longest string is that of ``state`` plus ``token``; split off a larger one if need be."""
        transitions, link = self._next, self._link
        target = transitions[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._add_state(transitions[target].copy(), link[target], length, self._last[target])
        link[target] = split
        while state >= 0 and transitions[state].get(token) == target:
            transitions[state][token] = split
            state = link[state]
        return split


class LookupDrafter(Drafter):
    """Drafts the tokens that followed the longest earlier occurrence of a request's last tokens.

    - The text is the request's reference, if it has one, then its prompt and output. A match has at least
      ``match_length`` tokens. The longest wins; among equals the most recent, so output before prompt before reference.
    - A copy that reaches the end of the text goes on into what it has just copied (as in LZ77), so periodic text
      drafts its full length. A copy from the reference ends where the reference ends; no match runs across that border.
    - Copied tokens have no distribution, for sampled requests too: each stays if it is what the target draws.
    - A draft that may be a tree has other continuations as branches, where they leave the copy. How likely they are
      follows from how often matches foretold the next token.

    The gate keeps bad copies short, because in a large batch each rejected token costs compute. While fewer than half
    of the recent matches foretold their next token, a copy is no longer than its match. The gate looks at the text
    alone: never at other requests, nor at drafts that were discarded, nor at where rounds began. With a reference,
    where copying is expected, it starts open. Adaptive requests do without the gate: how much of a copy they test is
    chosen by what became of earlier copies. ``gate=False`` copies the full length after every match, as in the paper. A
    ``match_length`` of less than 1 is an InvalidRequestError.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_COPY_LENGTH, is_free=True, takes_reference=True, goes_on=True)

    def __init__(self, match_length: int = DEFAULT_MATCH_LENGTH, *, gate: bool = True) -> None:
        if match_length < 1:
            raise InvalidRequestError(f"match_length is {match_length}.", "give at least 1.")
        self.match_length = match_length
        self.gate = gate
        # By request, not by row: nothing to do when rows move, and a dropped request takes its index along.
        self._indexes: WeakKeyDictionary[Request, SuffixIndex] = WeakKeyDictionary()

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Up to ``lookaheads[i]`` copied tokens for each request; see ``Drafter.propose``."""
        return [
            self._copy(req, lookahead, [] if begun is None else begun[i].tokens) if lookahead > 0 else _NOTHING
            for i, (req, lookahead) in enumerate(zip(requests, lookaheads, strict=True))
        ]

    def commit(self, requests: Sequence[Request]) -> None:
        """Drop what finished requests no longer need; new tokens are read at the next proposal."""
        for req in requests:
            if req.finish_reason is not None:
                self._indexes.pop(req, None)

    def _updated_index(self, req: Request) -> SuffixIndex:
        index = self._indexes.get(req)
        before = len(req.reference) + 1 if req.reference else 0
        if index is None:
            index = self._indexes[req] = SuffixIndex(self.match_length)
            index.extend(req.reference)
            if req.reference:
                index.append(_SEPARATOR)
                index.extend(req.tokens)
                index.hit_rate = 1.0
        index.extend(req.tokens[len(index.tokens) - before :])
        return index

    def _copy(self, req: Request, count: int, begun: list[int]) -> Proposal:
        index = self._updated_index(req)
        matched, place = index.match_behind(begun)
        if matched < self.match_length:
            return _NOTHING
        copied = _read_text(index, place, count)
        if len(copied) < count and place + len(copied) == len(index.tokens):  # what was copied so far repeats
            copied += begun
            copied = (copied * (count // len(copied) + 1))[:count]
        end: DraftEnd = "lookahead" if len(copied) == count else "text"
        chain = copied
        if self.gate and not req.adaptive and index.hit_rate < 0.5 and matched < len(copied):
            chain, end = copied[:matched], "exit"
        if not chain:
            return _NOTHING
        room, forced = count_branch_room(req, len(chain)), tuple(range(len(begun)))
        whole, copied = [*begun, *chain], [*begun, *copied]
        branches = _build_continuations(index, whole, copied, len(begun), count).branches(room) if room else ()
        return Proposal(whole, None, end, "lookup", matched, forced=forced, branches=branches)


def _build_continuations(
    index: SuffixIndex, chain: list[int], copied: list[int], first: int, most: int
) -> Continuations:
    """A copy, and where it may be left: what else followed matches, up to ``most`` tokens from place ``first`` on.

    How likely each is follows from how often a match foretold the next token, and where there are several ways to leave
    the copy, each takes half of what those before it leave.
    """
    right = min(max(index.hit_rate, _MIN_RATE), 1.0 - _MIN_RATE)
    found, chances = Continuations(chain), [right**depth for depth in range(most + 1)]
    found.add(copied, [*[1.0] * first, *chances[1 : len(copied) - first + 1]])
    for depth, token in enumerate(copied[first:]):
        before, share = copied[: first + depth], chances[depth] * (1.0 - right)
        ways = index.find_continuations(before, _MAX_WAYS) if share > 2 * _MIN_CHANCE else []
        for other, place in ways:
            if other in (token, _SEPARATOR):
                continue
            share /= 2
            behind = _read_text(index, place, most - depth - 1)
            added = [share * chance for chance in chances[: len(behind) + 1]]
            found.add([*before, other, *behind], [*[0.0] * len(before), *added])
    return found


def _read_text(index: SuffixIndex, place: int, count: int) -> list[int]:
    """Up to ``count`` tokens from a place on, of the reference up to its end."""
    found = index.tokens[place : place + count]
    return found[: found.index(_SEPARATOR)] if _SEPARATOR in found else found


_NOTHING = Proposal([], end="none")

KIND = DrafterKind(
    LookupDrafter.traits,
    lambda parts: LookupDrafter(match_length=parts.match_length),
    lambda _offer: None,
    method="ngram",
    config_keys=frozenset(["prompt_lookup_min"]),
)
