"""What was generated before, found by its longest suffix: against a search of everything."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.suffix import best_path
from specexport_runtime.drafters.suffix_segment import DEPTH, SEPARATOR, SuffixSegment, segment_of, split_texts
from specexport_runtime.drafters.suffix_store import SEGMENT_TOKENS, SuffixStore
from tests.support.cases.chance import examples

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=50), min_size=1, max_size=12)


def search(texts, context, least):
    """Length of the longest suffix of ``context`` that something follows in a text, and all that follows it."""
    for length in range(min(len(context), DEPTH), least - 1, -1):
        suffix = context[-length:]
        found = [text[end:] for text in texts for end in range(length, len(text)) if text[end - length : end] == suffix]
        if found:
            return length, found
    return None


@examples(150)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(2, 5))
def test_a_segment_finds_the_longest_suffix_and_every_place(texts, context, least):
    segment = segment_of(texts)
    match = segment.find(context[::-1], least)
    expected = search(texts, context, least)
    if expected is None:
        assert match is None
        return
    length, found = expected
    assert match.length == length
    places = segment.newest(match, 10_000)
    assert [segment.read(start, 10_000) for start in places] == found[::-1]
    assert list(split_texts(segment.tokens)) == texts


@examples(60)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_a_store_finds_the_same_however_its_segments_were_joined(texts, context):
    many, one = SuffixStore(10_000), SuffixStore(10_000, texts)
    for text in texts:
        many.add("a", text)
    found = many.find("a", context, least=2, most=8, width=6)
    long = [text for text in texts if len(text) > 1]
    expected = search(long, context, 2)
    assert found == one.find(None, context, least=2, most=8, width=6)
    if expected is None:
        assert found is None
    else:
        assert (found.length, found.places) == (expected[0], len(expected[1]))
        assert found.continuations == [rest[:6] for rest in expected[1][::-1]][:8]


def test_large_segments_are_joined_beside_and_found_all_the_same():
    rng = np.random.default_rng(5)
    hurried, store = SuffixStore(1 << 20), SuffixStore(1 << 20)
    texts = [rng.integers(0, 1000, 1500).tolist() for _ in range(64)]
    for text in texts:
        hurried.add("a", text)  # while a join goes on, or when one is over
        store.add("a", text)
        store.settle()
    before = [hurried.find("a", text[:900], least=2, most=4, width=8) for text in texts]
    assert [store.find("a", text[:900], least=2, most=4, width=8) for text in texts] == before
    assert all(found.continuations == [text[900:908]] for found, text in zip(before, texts, strict=True))
    segments = store._shelves["a"].segments
    assert len(segments) == 1
    assert sum(len(segment) for segment in segments) == store.num_tokens == 64 * 1501


def test_scopes_see_their_own_texts_and_the_corpus_only():
    store = SuffixStore(1000, [[9, 8, 7, 6]])
    store.add("a", [1, 2, 3, 4])
    store.add("b", [1, 2, 5, 6])

    def after(scope, context):
        found = store.find(scope, context, least=2, most=4, width=4)
        return None if found is None else found.continuations

    assert after("a", [1, 2]) == [[3, 4]]
    assert after("b", [1, 2]) == [[5, 6]]
    assert after(None, [1, 2]) is None
    assert after("nobody", [1, 2]) is None
    assert [after(scope, [9, 8]) for scope in ("a", "b", None)] == [[[7, 6]]] * 3
    store.clear("a")
    assert after("a", [1, 2]) is None
    assert store.num_tokens == 10


def test_beyond_the_bound_the_oldest_is_forgotten_whoever_wrote_it():
    store = SuffixStore(4096)
    for i in range(40):
        store.add("ab"[i % 2], [i, *range(1000, 1300)])
        assert store.num_tokens <= 4096
    kept = [i for i in range(40) if store.find("ab"[i % 2], [i, 1000], least=2, most=1, width=1)]
    assert kept == list(range(kept[0], 40))
    assert len(kept) >= 7  # the bound less one segment of an eighth of it


def test_many_scopes_with_short_texts_stay_within_the_bound():
    """A segment has a cost of its own, or a million salts would take a hundred times the memory."""
    store = SuffixStore(100_000)
    for i in range(3000):
        store.add(f"salt {i}", [i, i, i])
    assert len(store._shelves) == 100_000 // (SEGMENT_TOKENS + 4)
    assert store.find("salt 2999", [2999, 2999], least=2, most=1, width=1) is not None
    assert store.find("salt 0", [0, 0], least=2, most=1, width=1) is None
    many = SuffixStore(100_000)
    tracemalloc.start()
    try:
        for i in range(500):
            many.add(f"salt {i}", [i, i, i])
        assert tracemalloc.get_traced_memory()[0] < 1.2 * many.num_bytes
    finally:
        tracemalloc.stop()


def test_of_a_text_beyond_the_largest_segment_the_end_is_kept():
    store = SuffixStore(4096)
    store.add("a", list(range(5000)))
    assert store.find("a", [4990, 4991], least=2, most=1, width=2).continuations == [[4992, 4993]]
    assert store.num_tokens == 512
    store = SuffixStore(8 * 300)
    store.restore("a", [list(range(i, i + 90)) for i in range(12)])
    assert store.find("a", [50, 51], least=2, most=20, width=1).places == 12


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="not be negative"):
        SuffixStore(100).add("a", [1, SEPARATOR, 2])
    with pytest.raises(ValueError, match="between 0 and"):
        SuffixSegment(np.array([1 << 21], np.int32))
    with pytest.raises(ValueError, match="more than 10 tokens"):
        SuffixStore(10, [[1] * 20])


def scores(continuations, prefix=()):
    """All paths with their scores, by brute force over prefixes."""
    here = [each for each in continuations if tuple(each[: len(prefix)]) == prefix]
    yield prefix, 0.0
    for token in {each[len(prefix)] for each in here if len(each) > len(prefix)}:
        chance = sum(len(each) > len(prefix) and each[len(prefix)] == token for each in here) / len(here)
        for path, score in scores(continuations, (*prefix, token)):
            yield path, chance * (1 + score)


@examples(100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8))
def test_the_path_has_the_highest_score(continuations):
    path = best_path(continuations)
    by_path = dict(scores(continuations))
    assert path.score == pytest.approx(max(by_path.values()))
    assert path.score == pytest.approx(by_path[tuple(path.tokens)]) == pytest.approx(sum(path.chances))
