"""Lookup drafting: the rules one by one, and that nothing it drafts changes the output."""

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter, SuffixIndex
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.loop import finish, greedy_reference, make_sequence, make_target

LOOKUP = (DraftStage("lookup", 7),)
REFERENCE = [11, 12, 13, 14, 15]


def sequence(tokens, reference=(), **options):
    params = SamplingParams(max_tokens=40, **options)
    return make_sequence(0, tokens, params, draft_plan=LOOKUP, reference=reference)


def copy(tokens, count=7, reference=(), match_length=2, gate=False):
    drafter = LookupDrafter(match_length, gate=gate)
    return drafter.propose([sequence(tokens, reference)], [count])[0].tokens


@pytest.mark.parametrize(
    ("text", "options", "copied"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], {}, [3, 4, 5, 6, 7, 8, 9]),
        ([1, 2, 3, 4, 9, 2], {}, []),  # a shorter match is none
        ([1, 2, 3, 4, 9, 2], {"count": 2, "match_length": 1}, [3, 4]),
        ([1, 2, 3, 0, 1, 2, 3], {"match_length": 4}, []),
        ([1, 2, 3, 0, 1, 2, 3], {"count": 1, "match_length": 3}, [0]),
        ([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], {"count": 1}, [7]),  # the longest match wins over a more recent one
        ([2, 3, 7, 0, 2, 3, 8, 0, 2, 3], {"count": 1}, [8]),  # among equals the most recent
        ([1, 2, 3, 1, 2, 3], {}, [1, 2, 3, 1, 2, 3, 1]),  # a copy goes on into what it copied
        ([5, 5, 5], {}, [5] * 7),
        ([1, 2, 3, 4], {}, []),
        ([1], {}, []),
        ([1, 2, 1, 2], {"count": 0}, []),
        ([1, 2, 12, 13], {"reference": REFERENCE}, [14, 15]),  # it ends with the reference
        ([1, 14, 15], {"reference": REFERENCE}, []),
        ([14, 15], {"reference": [1, 14, 15, 2]}, [2]),  # the text after the match is shorter than the copy
        ([1, 2, 15, 1], {"reference": REFERENCE}, []),  # "15 1" lies across the border, once
        ([1, 2, 15, 1], {"reference": REFERENCE, "match_length": 1, "count": 1}, [2]),
        ([1, 2, 3, 1, 2], {"reference": REFERENCE, "count": 3}, [3, 1, 2]),
        ([0, 12, 13, 9, 11, 12, 13], {"reference": REFERENCE, "count": 1}, [14]),
        ([11, 12, 13, 9, 11, 12, 13], {"reference": REFERENCE, "count": 1}, [9]),
    ],
)
def test_copies_what_followed_the_last_tokens(text, options, copied):
    assert copy(text, **options) == copied


def test_the_gate_shortens_copies_to_their_match_until_matches_are_right_again():
    wrong = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    assert len(copy(wrong, gate=False)) == 7
    assert copy(wrong, gate=True) == [5, 1]
    assert len(copy([1, 2, 3] * 4, gate=True)) == 7
    assert len(copy([*wrong, *[6, 7, 8, 9] * 7], gate=True)) == 7


def test_the_gate_starts_open_with_a_reference():
    assert copy([*[1, 2, 3, 1, 2, 4, 1, 2, 5], 11, 12], reference=[*REFERENCE, 16, 0, 1], gate=True) == [
        *[13, 14, 15, 16, 0, 1]
    ]


@examples(100)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 29), st.booleans())
def test_proposals_depend_on_the_committed_text_alone(text, split, gate):
    """Not on when the drafter was asked before, nor on what it proposed then."""
    split = min(split, len(text) - 1)
    asked, fresh = LookupDrafter(gate=gate), LookupDrafter(gate=gate)
    seq = sequence(text[:split])
    for token in text[split:]:
        asked.propose([seq], [5])
        seq.tokens.append(token)
    assert asked.propose([seq], [7]) == fresh.propose([seq], [7])


def test_a_sequence_that_was_never_asked_costs_nothing():
    drafter = LookupDrafter()
    drafter.propose([sequence([1, 2, 1, 2])], [0])
    assert not drafter._indexes


def test_what_is_known_of_a_sequence_is_dropped_when_it_ends():
    drafter, pair = LookupDrafter(), [sequence([1, 2, 1, 2]) for _ in range(2)]
    drafter.propose(pair, [3, 3])
    pair[0].finish_reason = "stop"
    drafter.commit(pair)
    assert list(drafter._indexes) == pair[1:]


def decode(target, sequences, **options):
    finish(Decoder(ModelRunner(target), ChainDrafter({"lookup": LookupDrafter(**options)})), sequences)


def test_a_reference_of_the_right_text_is_accepted_whole():
    target = make_target(context=6)
    expected, options = greedy_reference(target, [3, 4], 30), {"draft_plan": LOOKUP}
    pair = [
        make_sequence(i, [3, 4], SamplingParams(max_tokens=30), reference=reference, **options)
        for i, reference in enumerate(([3, 4, *expected], ()))
    ]
    decode(target, pair)
    assert pair[0].output == pair[1].output == expected
    assert pair[0].stats.rounds <= 6
    assert pair[0].stats.acceptance_rate == 1.0


def searched(text):
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
        length, end = searched(text[:i])
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
        assert answer == searched(text[:i])


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
    "one token": [5] * 4096, "period 7": list(range(7)) * 585, "run, other, run": [0] * 2048 + [1] + [0] * 2047,
    "runs with new ends": [token for j in range(45) for token in [0] * 90 + [1 + j]], "fibonacci": fibonacci(4096),
    "all new": list(range(4096)),
}  # fmt: skip


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
