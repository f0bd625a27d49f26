"""Lookup drafting: the rules one by one, and that nothing it drafts changes the output."""

import gc
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from tests.support.cases.chance import examples
from tests.support.fakes.loop import greedy_reference, make_sequence, make_target
from tests.support.references.exact import P_VALUE, PROMPT, Toy, emit, p_value

LOOKUP = (DraftStage("lookup", 7),)
REFERENCE = [11, 12, 13, 14, 15]


def sequence(tokens, reference=(), **options):
    params = SamplingParams(max_tokens=40, **options)
    return make_sequence(0, tokens, params, draft_plan=LOOKUP, reference=reference)


def copy(tokens, count=7, reference=(), match_length=2, gate=False):
    drafter = LookupDrafter(match_length, gate=gate)
    return drafter.propose([sequence(tokens, reference)], [count])[0].tokens


def test_copies_what_followed_the_last_tokens():
    assert copy([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]) == [3, 4, 5, 6, 7, 8, 9]
    assert copy([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], count=3) == [3, 4, 5]


def test_a_shorter_match_is_no_match():
    text = [1, 2, 3, 4, 9, 2]
    assert copy(text) == []
    assert copy(text, count=2, match_length=1) == [3, 4]
    assert copy([1, 2, 3, 0, 1, 2, 3], match_length=4) == []
    assert copy([1, 2, 3, 0, 1, 2, 3], count=1, match_length=3) == [0]


def test_the_longest_match_wins_over_a_more_recent_one():
    assert copy([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], count=1) == [7]


def test_among_equals_the_most_recent_wins():
    assert copy([2, 3, 7, 0, 2, 3, 8, 0, 2, 3], count=1) == [8]


def test_a_copy_goes_on_into_what_it_copied():
    assert copy([1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    assert copy([5, 5, 5]) == [5] * 7
    assert copy([0, 1, 2, 1, 2], count=4) == [1, 2, 1, 2]


def test_nothing_is_copied_without_a_match_or_without_room():
    assert copy([1, 2, 3, 4]) == []
    assert copy([1]) == []
    assert copy([1, 2, 1, 2], count=0) == []


def test_proposals_are_one_hot_for_sampled_sequences_too():
    proposal = LookupDrafter().propose([sequence([1, 2, 1, 2], temperature=1.0)], [3])[0]
    assert proposal.tokens
    assert proposal.distributions is None


def test_a_reference_is_copied_from():
    assert copy([1, 2, 12, 13], reference=REFERENCE, count=2) == [14, 15]


def test_a_copy_ends_with_the_reference():
    assert copy([1, 2, 12, 13], reference=REFERENCE) == [14, 15]
    assert copy([1, 14, 15], reference=REFERENCE) == []
    # The text after the match is shorter than the copy, with the border in it.
    assert copy([14, 15], reference=[1, 14, 15, 2]) == [2]


def test_no_match_runs_across_the_border():
    # "15 1" lies across it, once: a match of those two would copy 2.
    assert copy([1, 2, 15, 1], reference=REFERENCE) == []
    assert copy([1, 2, 15, 1], reference=REFERENCE, match_length=1, count=1) == [2]


def test_the_separator_does_not_change_the_text_itself():
    assert copy([1, 2, 3, 1, 2], reference=REFERENCE, count=3) == [3, 1, 2]


def test_reference_and_text_compete_on_length_then_on_recency():
    assert copy([0, 12, 13, 9, 11, 12, 13], reference=REFERENCE, count=1) == [14]
    assert copy([11, 12, 13, 9, 11, 12, 13], reference=REFERENCE, count=1) == [9]


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


def test_state_is_dropped_when_a_sequence_finishes_or_disappears():
    drafter = LookupDrafter()
    finished, dropped = sequence([1, 2, 1, 2]), sequence([1, 2, 1, 2])
    drafter.propose([finished, dropped], [3, 3])
    assert len(drafter._indexes) == 2
    finished.finish_reason = "stop"
    drafter.commit([finished, dropped])
    assert list(drafter._indexes) == [dropped]
    alive = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert alive() is None
    assert not drafter._indexes


def test_rows_do_not_matter():
    drafter = LookupDrafter()
    seq = sequence([1, 2, 3, 1, 2])
    seq.row = 3
    before = drafter.propose([seq], [4])
    drafter.release_row(0)
    drafter.move_row(3, 0)
    seq.row = 0
    assert drafter.propose([seq], [4]) == before


def test_match_length_must_be_positive():
    with pytest.raises(InvalidRequestError, match="match_length"):
        LookupDrafter(0)


def decode(target, sequences, **options):
    decoder = Decoder(ModelRunner(target), ChainDrafter({"lookup": LookupDrafter(**options)}))
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
        decoder.check()
    return decoder


PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7, 0, 7], [2, 2], [11, 5, 0, 1]]


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("reference", [(), (1, 2, 3, 4, 5, 6, 16, 16, 0, 7, 7)])
def test_greedy_output_equals_plain_greedy(gate, reference):
    target = make_target(context=2)  # repeats itself, so that copies are accepted
    sequences = [
        make_sequence(i, p, SamplingParams(max_tokens=20 + 5 * i), draft_plan=LOOKUP, reference=reference)
        for i, p in enumerate(PROMPTS)
    ]
    decode(target, sequences, gate=gate)
    for seq, prompt in zip(sequences, PROMPTS, strict=True):
        assert seq.output == greedy_reference(target, prompt, seq.params.max_tokens)
    assert sum(seq.stats.accepted for seq in sequences) > 50
    assert sum(seq.stats.drafted - seq.stats.accepted for seq in sequences) > 0


def test_a_reference_of_the_right_text_is_accepted_whole():
    target = make_target(context=6)
    expected = greedy_reference(target, [3, 4], 30)
    with_reference = make_sequence(
        0, [3, 4], SamplingParams(max_tokens=30), draft_plan=LOOKUP, reference=[3, 4, *expected]
    )
    without = make_sequence(1, [3, 4], SamplingParams(max_tokens=30), draft_plan=LOOKUP)
    decode(target, [with_reference, without])
    assert with_reference.output == without.output == expected
    assert with_reference.stats.rounds <= 6
    assert with_reference.stats.acceptance_rate == 1.0


def test_sampled_output_does_not_depend_on_the_batch():
    def make(i, seed):
        return make_sequence(
            i, PROMPTS[i % len(PROMPTS)], SamplingParams(max_tokens=30, temperature=0.6), seed=seed, draft_plan=LOOKUP
        )

    alone, shared = make(3, 42), make(3, 42)
    decode(make_target(context=1), [alone])
    decode(make_target(context=1), [make(0, 1), make(1, 2), shared, make(2, 3), make(4, 5)])
    assert alone.stats.accepted > 0
    assert shared.output == alone.output


class LookupToy(Toy):
    """The table-driven target of the sampling tests, drafted for by the real drafter."""

    def __init__(self, params, **options):
        super().__init__(params, "one-hot")
        self.drafter = LookupDrafter(match_length=1, **options)
        self.drafted = 0

    def propose(self, done, lookahead, draws):
        seq = make_sequence(0, [*PROMPT, 0, 1, 2, 3, 4, 5, *PROMPT, *done], self.params)
        proposal = self.drafter.propose([seq], [lookahead])[0]
        self.drafted += len(proposal.tokens)
        return tuple(proposal.tokens), proposal.distributions


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"temperature": 1.3, "top_k": 4, "frequency_penalty": 0.5}])
def test_sampled_output_follows_the_targets_distribution(params, gate):
    from specexport_runtime.sampling.accept import accept_sampled

    toy = LookupToy(SamplingParams(**params), gate=gate)
    counts = Counter(
        emit(toy, 2, 3, RoundDraws(RandomStream(seed), fresh=False), accept_sampled) for seed in range(2500)
    )
    assert toy.drafted > 2500
    assert p_value(counts, toy.exact(2)) > P_VALUE
