"""A text in which the places that follow a given context are found at once: all of its contexts, sorted.

A suffix array of the reversed text (Manber and Myers 1990, "Suffix arrays: a new method for on-line string searches"):
the node of a suffix trie that a context leads to is a range of the array, and the count of a node is the range's
width. So 16 bytes a token hold what a trie of linked nodes needs hundreds for, and sorting is the only work.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SEPARATOR = -1
"""Between texts; it is no token id, and no match and no continuation goes across it."""
DEPTH = 32
"""Tokens of a context that are told apart; the length of a longer match is of no use."""
BYTES_PER_TOKEN = 16
_BITS = 21  # of a token id in a key of three
_TOKEN_LIMIT = (1 << _BITS) - 2

TokenArray = npt.NDArray[np.int32]


class Match(NamedTuple):
    """Places of a segment that follow the longest known suffix of a context."""

    length: int  # tokens of that suffix; at most ``DEPTH``
    first: int  # place in the sorted order
    last: int  # after the last place


class SuffixSegment:
    """Texts that do not change any more: token ids int32 [n], and a ``SEPARATOR`` after each text."""

    def __init__(self, tokens: TokenArray) -> None:
        if len(tokens) and (int(tokens.min()) < SEPARATOR or int(tokens.max()) > _TOKEN_LIMIT):
            raise ValueError(f"token ids must lie between 0 and {_TOKEN_LIMIT}.")
        self.tokens = tokens
        codes = tokens.astype(np.int64) + 1  # 0 is the separator, and what lies before the text
        places = _sort_contexts(codes)
        follows = np.append(tokens[1:], SEPARATOR) != SEPARATOR
        places = places[follows[places] & (codes[places] > 0)]
        padded = np.concatenate([np.zeros(2, np.int64), codes])
        self._keys = (padded[places + 2] << 2 * _BITS) | (padded[places + 1] << _BITS) | padded[places]
        self._places = places.astype(np.int32)
        # Single items of a memoryview are read several times as fast as those of an array.
        self._token_at, self._place_at = tokens.data, self._places.data

    def __len__(self) -> int:
        """Tokens, separators included."""
        return len(self.tokens)

    def find(self, recent: Sequence[int], least: int) -> Match | None:
        """The longest suffix of a context (``recent``: newest first) that occurs here; None below ``least`` tokens."""
        if len(recent) < least:
            return None
        pair = (recent[0] + 1) << 2 * _BITS | (recent[1] + 1) << _BITS
        third = pair | (recent[2] + 1 if len(recent) > 2 else 0)
        bounds = self._keys.searchsorted(np.array([pair, pair + (1 << _BITS), third, third + 1]))
        first, last, low, high = bounds.tolist()
        length = 2
        if first == last or (low == high and least > length):
            return None
        if low < high and len(recent) > 2:
            length, first, last = self._narrow_range(list(recent[:DEPTH]), low, high, least)
        return Match(length, first, last) if length >= least else None

    def _narrow_range(self, wanted: list[int], first: int, last: int, least: int) -> tuple[int, int, int]:
        """How much of a context the places of a range share with it at most, and the range of those that do."""
        if last - first > 1:
            everywhere, whole = range(last), len(wanted)
            if least > 3:
                prefix = wanted[:least]
                first = bisect_left(everywhere, prefix, first, last, key=lambda i: self._context(i, least))
                if first == last or self._context(first, least) != prefix:
                    return 0, first, first
            at = bisect_left(everywhere, wanted, first, last, key=lambda i: self._context(i, whole))
            length = max(self._count_shared(wanted, i) for i in (at - 1, at) if first <= i < last)
            prefix = wanted[:length]
            low = bisect_left(everywhere, prefix, first, at, key=lambda i: self._context(i, length))
            high = bisect_right(everywhere, prefix, at, last, key=lambda i: self._context(i, length))
            return length, low, high
        return self._count_shared(wanted, first), first, last

    def _context(self, i: int, length: int) -> list[int]:
        """The last tokens before the ``i``-th place in the sorted order, the newest first."""
        end = self._place_at[i] + 1
        found: list[int] = self._token_at[max(end - length, 0) : end].tolist()
        found.reverse()
        return found

    def _count_shared(self, wanted: list[int], i: int) -> int:
        """How many tokens of a context the ``i``-th place follows."""
        known = self._context(i, len(wanted))
        return next(
            (n for n, (a, b) in enumerate(zip(wanted, known, strict=False)) if a != b), min(len(wanted), len(known))
        )

    def newest(self, match: Match, count: int) -> list[int]:
        """Where the newest ``count`` continuations of a match begin, the newest first."""
        places = self._places[match.first : match.last]
        if len(places) > count:
            places = np.partition(places, len(places) - count)[-count:]
        return sorted([place + 1 for place in places.tolist()], reverse=True)

    def read(self, start: int, count: int) -> list[int]:
        """Up to ``count`` tokens from ``start`` on, up to the end of their text."""
        found: list[int] = self._token_at[start : start + count].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


def split_texts(tokens: TokenArray) -> Iterator[list[int]]:
    """The texts of a segment's tokens, in order; what has no separator after it is none."""
    start = 0
    for end in np.flatnonzero(tokens == SEPARATOR).tolist():
        yield tokens[start:end].tolist()
        start = end + 1


def join_segments(segments: Sequence[SuffixSegment]) -> SuffixSegment:
    """One segment of the texts of several, in their order."""
    return SuffixSegment(np.concatenate([segment.tokens for segment in segments]))


def make_segment(texts: Sequence[Sequence[int]]) -> SuffixSegment:
    """A segment of some texts; ValueError if a token id is out of range."""
    ids = [token for text in texts for token in (*text, SEPARATOR)]
    if any(token < 0 for text in texts for token in text):
        raise ValueError("token ids must not be negative.")
    return SuffixSegment(np.array(ids, np.int32))


def _sort_contexts(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of a text sorted by what they end, by prefix doubling (Manber and Myers 1990)."""
    size = len(codes)
    if size < 2:
        return np.arange(size)
    ranks, step, num_ranks = codes, 1, int(codes.max()) + 1
    while True:
        keys = ranks * (num_ranks + 1)
        keys[step:] += ranks[:-step] + 1
        order = np.argsort(keys)
        ordered = keys[order]
        changes = ordered[1:] != ordered[:-1]
        num_ranks = int(np.count_nonzero(changes)) + 1
        step *= 2
        if num_ranks == size or step >= min(DEPTH, size):
            return order
        ranks = np.empty(size, np.int64)
        ranks[order[0]] = 0
        ranks[order[1:]] = np.cumsum(changes)
