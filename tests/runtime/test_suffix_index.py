"""The suffix index against a brute-force search, and the work it does on texts made to be hard."""

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specexport_runtime.drafters.lookup import SuffixIndex
from tests.support.cases.chance import examples


def search(text):
    """Length of the longest suffix that occurred before, and where its most recent earlier occurrence ends."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                return length, end
    return 0, None


def hit_rate(text, min_length):
    rate = 0.5
    for i in range(1, len(text)):
        length, end = search(text[:i])
        if length >= min_length:
            rate += 0.1 * ((text[end] == text[i]) - rate)
    return rate


def answers(text, min_length=1):
    index = SuffixIndex(min_length)
    for token in text:
        index.append(token)
        yield index.match_length, index.match_end if index.match_length else None
    assert index.tokens == list(text)


PERIODIC = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 30)).map(
    lambda drawn: (drawn[0] * 40)[: drawn[1]]
)


@examples(300)
@given(st.lists(st.integers(0, 3), max_size=60) | st.tuples(PERIODIC, PERIODIC).map(lambda pair: pair[0] + pair[1]))
@example([0] * 60)
@example([0] * 29 + [1] + [0] * 30)
@example([0, 1] * 30)
def test_longest_match_and_most_recent_place(text):
    for i, answer in enumerate(answers(text), start=1):
        assert answer == search(text[:i])


@examples(100)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3))
def test_hit_rate(text, min_length):
    index = SuffixIndex(min_length)
    index.extend(text)
    assert index.hit_rate == pytest.approx(hit_rate(text, min_length))


def test_beyond_the_bounded_walk_matches_stay_longest_and_places_stay_true():
    blocks = [token for j in range(4) for token in [0] * 150 + [1 + j]]
    for i, (length, end) in enumerate(answers(blocks), start=1):
        text = blocks[:i]
        if length:
            assert text[end - length : end] == text[i - length :]
        run = i % 151
        if i > 151 and run:
            assert length == run


def fibonacci(count):
    shorter, longer = [0], [0, 1]
    while len(longer) < count:
        shorter, longer = longer, longer + shorter
    return longer[:count]


HARD = {
    "one token": [5] * 4096,
    "period 7": list(range(7)) * 585,
    "run, other, run": [0] * 2048 + [1] + [0] * 2047,
    "runs with new ends": [token for j in range(45) for token in [0] * 90 + [1 + j]],
    "fibonacci": fibonacci(4096),
    "all new": list(range(4096)),
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_work_is_linear_on_hard_texts(text):
    """Counts executed lines, not seconds: a walk over the whole chain of links would take millions."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    index = SuffixIndex()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        index.extend(text)
    finally:
        sys.settrace(before)
    assert lines < 300 * len(text)
    assert len(index._link) <= 2 * len(text)


@examples(200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_what_matches_behind_tokens_that_are_not_in_the_text_is_found_by_brute_force_too(text, behind):
    index = SuffixIndex()
    index.extend(text)
    before = index.match_length, index.match_end
    length, end = index.match_behind(behind)
    whole = text + behind
    found = [
        count
        for count in range(1, len(text) + 1)
        if any(text[i : i + count] == whole[-count:] for i in range(len(text) - count + 1))
    ]
    assert length == max(found, default=0)
    assert not length or text[end - length : end] == whole[-length:]
    assert (index.match_length, index.match_end) == index.match_behind([]) == before
