"""What was generated before, kept by who may see it, in bounded memory."""

import heapq
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from specexport_runtime.drafters.suffix_segment import (
    BYTES_PER_TOKEN,
    DEPTH,
    Match,
    SuffixSegment,
    TokenArray,
    join_segments,
    make_segment,
)

DEFAULT_MEMORY_MB = 16
"""Of an engine that is not told how much to keep: a million tokens."""
SEGMENT_TOKENS = 104
"""What a segment costs besides its tokens, in tokens: its objects take 1.6 KB, however short the text."""
_FAN = 8
"""Neighbours of a size that are joined: a token is sorted anew once for each power of it."""
_SMALLEST = 256  # tokens of the smallest size
_LARGEST = 1 << 18  # tokens of a segment that is not joined any more
_INLINE = 1 << 13
"""Tokens that are sorted at once, within a few milliseconds; more are sorted beside the decoding thread."""
_LARGEST_SHARE = 8  # of the bound: one segment is forgotten at a time


class SuffixContinuations(NamedTuple):
    """Continuations of the longest match."""

    length: int  # tokens that matched
    places: int  # how many places matched
    continuations: list[list[int]]  # what followed at the newest of them, the newest first


class _ScopeSegments:
    """The segments of one scope, the oldest first, with the number of the newest text in each."""

    def __init__(self) -> None:
        self.segments: list[SuffixSegment] = []
        self.newest: list[int] = []
        self.join: _Join | None = None


class _Join:
    """Segments that are sorted together in another thread."""

    def __init__(self, segments: Sequence[SuffixSegment]) -> None:
        self.segments = tuple(segments)
        self.result: SuffixSegment | None = None
        self._thread = threading.Thread(target=self._run, name="specexport-suffixes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = join_segments(self.segments)

    def wait(self) -> SuffixSegment:
        self._thread.join()
        if self.result is None:
            raise MemoryError("the texts that were generated before could not be sorted.")
        return self.result


class SuffixStore:
    """Texts of many scopes, searched for the longest suffix of a context, by one thread.

    New texts become small segments. Eight neighbours of a size are joined, so that a search looks at few segments and a
    token is sorted again only a few times. Beyond ``max_tokens`` the segment whose newest text is the oldest is
    forgotten; each counts ``SEGMENT_TOKENS`` besides its own. The ``corpus``, which every scope may see, is never
    forgotten.
    """

    def __init__(self, max_tokens: int, corpus: Iterable[Sequence[int]] = ()) -> None:
        self.max_tokens = max_tokens
        self._shelves: dict[str, _ScopeSegments] = {}
        self._numbers = count()
        self._ages: list[tuple[int, str]] = []  # a heap: the newest text of the first segment of each shelf
        self._used = 0
        self._largest = max(_SMALLEST, min(_LARGEST, max_tokens // _LARGEST_SHARE))
        self._corpus: list[SuffixSegment] = []
        for segment in _make_segments(corpus, _LARGEST):
            self._corpus.append(segment)
            self._used += _cost(segment)
            if self._used > max_tokens:
                raise ValueError(f"the corpus has more than {max_tokens} tokens.")

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, a separator after each text included."""
        shelves = self._shelves.values()
        return sum(map(len, self._corpus)) + sum(len(segment) for shelf in shelves for segment in shelf.segments)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept; while segments are joined, theirs is needed twice."""
        return self._used * BYTES_PER_TOKEN

    def add(self, scope: str, text: Sequence[int]) -> None:
        """Keep a text; of one longer than the largest segment, the end. ValueError: it holds ids that are none."""
        text = text[-(self._largest - 1) :]
        if len(text) < 2:
            return
        self._append(scope, make_segment([text]))

    def restore(self, scope: str, texts: Iterable[Sequence[int]]) -> None:
        """Keep many texts, the oldest first, in segments that need not be joined; ValueError for ids that are none."""
        for segment in _make_segments(texts, self._largest):
            self._append(scope, segment)

    def _append(self, scope: str, segment: SuffixSegment) -> None:
        shelf = self._shelves.setdefault(scope, _ScopeSegments())
        self._take_join(scope, shelf)
        shelf.segments.append(segment)
        shelf.newest.append(next(self._numbers))
        self._used += _cost(segment)
        if len(shelf.segments) == 1:
            self._note_age(scope, shelf)
        self._join_neighbours(scope, shelf)
        self._forget()

    def find(
        self, scope: str | None, context: Sequence[int], *, least: int, most: int, width: int
    ) -> SuffixContinuations | None:
        """What followed the longest suffix, of ``least`` tokens, that a scope may see; the corpus alone for None."""
        shelf = None if scope is None else self._shelves.get(scope)
        segments = [*self._corpus, *(() if shelf is None else shelf.segments)]
        recent = context[: -DEPTH - 1 : -1]
        length = least
        matches: list[tuple[SuffixSegment, Match]] = []
        for segment in segments:
            match = segment.find(recent, length)
            if match is not None:
                if match.length > length:
                    length, matches = match.length, []
                matches.append((segment, match))
        if not matches:
            return None
        found: list[list[int]] = []
        for segment, match in reversed(matches):
            found += [segment.read(start, width) for start in segment.newest(match, most - len(found))]
            if len(found) == most:
                break
        return SuffixContinuations(length, sum(match.last - match.first for _, match in matches), found)

    def clear(self, scope: str) -> None:
        """Forget the texts of a scope."""
        shelf = self._shelves.pop(scope, None)
        if shelf is not None:
            self._used -= sum(map(_cost, shelf.segments))

    def items(self) -> Iterator[tuple[str, TokenArray]]:
        """Scopes and their texts, the oldest first, a separator after each; without the corpus."""
        for scope, shelf in self._shelves.items():
            yield scope, np.concatenate([segment.tokens for segment in shelf.segments])

    def settle(self) -> None:
        """Wait until nothing is being sorted."""
        for scope, shelf in self._shelves.items():
            while shelf.join is not None:
                shelf.join.wait()
                self._take_join(scope, shelf)
                self._join_neighbours(scope, shelf)

    def _take_join(self, scope: str, shelf: _ScopeSegments) -> None:
        """Put a joined segment in the place of its parts, if it is ready."""
        join = shelf.join
        if join is None or join.result is None:
            return
        shelf.join = None
        self._replace(scope, shelf, shelf.segments.index(join.segments[0]), len(join.segments), join.result)

    def _replace(self, scope: str, shelf: _ScopeSegments, first: int, number: int, joined: SuffixSegment) -> None:
        self._used += _cost(joined) - sum(map(_cost, shelf.segments[first : first + number]))
        shelf.segments[first : first + number] = [joined]
        shelf.newest[first : first + number] = [shelf.newest[first + number - 1]]
        if not first:
            self._note_age(scope, shelf)

    def _join_neighbours(self, scope: str, shelf: _ScopeSegments) -> None:
        """Join segments of a size for as long as there are enough of one, the smallest size first."""
        size = _SMALLEST
        while size < self._largest:
            size = _SMALLEST if self._join_size(scope, shelf, size) else size * _FAN

    def _join_size(self, scope: str, shelf: _ScopeSegments, size: int) -> bool:
        """Join the oldest of the newest segments of up to ``size`` tokens, if there are enough; whether there were."""
        begin = 0 if shelf.join is None else shelf.segments.index(shelf.join.segments[-1]) + 1
        first = len(shelf.segments)
        while first > begin and len(shelf.segments[first - 1]) <= size:
            first -= 1
        least = 0 if size == _SMALLEST else size // _FAN  # smaller ones belong to a smaller size
        last, total, enough = first, 0, _FAN
        while enough and last < len(shelf.segments):
            tokens = len(shelf.segments[last])
            last, total, enough = last + 1, total + tokens, enough - (tokens > least)
        if enough or total > self._largest or (total > _INLINE and shelf.join is not None):
            return False
        if total <= _INLINE:
            self._replace(scope, shelf, first, last - first, join_segments(shelf.segments[first:last]))
        else:
            shelf.join = _Join(shelf.segments[first:last])
        return True

    def _note_age(self, scope: str, shelf: _ScopeSegments) -> None:
        heapq.heappush(self._ages, (shelf.newest[0], scope))

    def _forget(self) -> None:
        while self._used > self.max_tokens and self._ages:
            number, scope = heapq.heappop(self._ages)
            shelf = self._shelves.get(scope)
            if shelf is None or shelf.newest[0] != number:
                continue  # its first segment was joined or is gone
            if shelf.join is not None and shelf.segments[0] is shelf.join.segments[0]:
                shelf.join = None
            self._used -= _cost(shelf.segments.pop(0))
            shelf.newest.pop(0)
            if shelf.segments:
                self._note_age(scope, shelf)
            else:
                del self._shelves[scope]


def _cost(segment: SuffixSegment) -> int:
    """What a segment takes of the bound."""
    return len(segment) + SEGMENT_TOKENS


def _make_segments(texts: Iterable[Sequence[int]], most: int) -> Iterator[SuffixSegment]:
    """Segments of texts in their order, each of about ``most`` tokens."""
    batch: list[Sequence[int]] = []
    size = 0
    for text in texts:
        if batch and size + len(text) >= most:
            yield make_segment(batch)
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    if batch:
        yield make_segment(batch)


def tokens_for_megabytes(megabytes: int) -> int:
    """The bound of a store that may take so many megabytes (10^6 bytes)."""
    return megabytes * 1_000_000 // BYTES_PER_TOKEN
