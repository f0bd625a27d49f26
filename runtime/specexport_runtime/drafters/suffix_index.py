"""Where the end of a growing text occurred before: a suffix automaton that also remembers recent places."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

_MAX_WALK = 64
_HIT_WEIGHT = 0.1


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

    def match_behind(self, tokens: Seq[int]) -> tuple[int, int]:
        """``match_length`` and ``match_end`` as if the text went on with ``tokens``; it stays as it is.

        What ends within these tokens is not found.
        """
        if not tokens:
            return self.match_length, self.match_end
        state, length = self._link[self._tail], self.match_length
        for token in tokens:
            while state >= 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state] if state >= 0 else 0
            state, length = (self._next[state][token], length + 1) if state >= 0 else (0, 0)
        return length, self._last[state]

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
