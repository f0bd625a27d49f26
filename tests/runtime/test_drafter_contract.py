"""What every drafter keeps, on fakes: plain decoding's text, true features, no neighbour's influence, nothing left."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.drafters import head as head_module
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.drafter_kinds import KINDS, NOISES
from tests.support.fakes.heads_on_fakes import PROMPTS, check_plain, make_sequences, totals
from tests.support.fakes.loop import VOCAB, finish, make_sequence, run

HEADS = [name for name, kind in KINDS.items() if kind.stage == "head"]
every_drafter = pytest.mark.parametrize("name", KINDS)


@pytest.mark.parametrize(
    ("name", "noise", "lookahead"),
    [
        (name, noise, lookahead)
        for name, kind in KINDS.items()
        for noise in (NOISES if kind.good is not None else ["same"])
        for lookahead in kind.lookaheads
    ],
)
def test_greedy_text_equals_plain_greedy(name, noise, lookahead):
    kind = KINDS[name]
    decoder, target, drafter = kind.make(lookahead, NOISES[noise])
    sequences = make_sequences(lambda i: 5 + 7 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    assert {seq.finish_reason for seq in sequences} == {"length"}
    drafted, accepted = totals(sequences)
    assert drafted > 50
    assert max(event.drafted for event in events) == min(lookahead, kind.most)
    if kind.good is None:
        assert accepted > drafted / 3
    else:
        rate = accepted / drafted
        assert {"same": rate == 1.0, "good": rate > kind.good, "random": rate < 1 / 3}[noise]
    kind.steps(target, drafter, lookahead)


@pytest.mark.parametrize("name", HEADS)
@examples(15)
@given(
    data=st.data(), lookahead=st.integers(1, 8), rows=st.integers(1, 4), max_chunk=st.integers(1, 10),
    lookup=st.booleans(),
)  # fmt: skip
def test_every_draft_is_made_of_the_verified_text_whatever_the_chunks_and_the_neighbours(
    name, data, lookahead, rows, max_chunk, lookup
):
    """Where nothing is noisy every draft is right."""
    kind = KINDS[name]
    sizes = {key: data.draw(strategy) for key, strategy in kind.sizes.items()}
    stages = ("lookup", kind.stage) if lookup else (kind.stage,)
    decoder, target, drafter = kind.make(lookahead, 0.0, rows, stages=stages, max_chunk=max_chunk, **sizes)
    sequences = make_sequences(lambda i: 4 + 5 * i)
    with pytest.MonkeyPatch.context() as patch:
        if kind.holds:
            drafter.max_backlog = 3
            patch.setattr(head_module, "MAX_HELD", data.draw(st.integers(1, 12)))
        events = run(decoder, sequences)
    check_plain(target, sequences)
    own = [event for event in events if event.drafted and event.proposal.drafter == kind.stage]
    # A draft may be longer than what is left of its text.
    assert all(event.accepted >= min(event.drafted, len(event.tokens)) - 1 for event in own)
    assert own
    if not lookup:
        drafted, accepted = totals(sequences)
        assert accepted == drafted > 0


@every_drafter
def test_sampled_text_does_not_depend_on_the_batch(name):
    def make(i):
        return make_sequence(i, PROMPTS[i], SamplingParams(max_tokens=25, temperature=0.8, top_k=12), seed=i + 5)

    together = [make(i) for i in range(4)]
    run(KINDS[name].make(4, 0.4)[0], together)
    for i, seq in enumerate(together):
        alone = make(i)
        run(KINDS[name].make(4, 0.4)[0], [alone])
        assert seq.output == alone.output
        assert seq.stats.accepted == alone.stats.accepted
    assert all(seq.stats.accepted for seq in together) or KINDS[name].good is None
    assert totals(together)[1] > 0


@every_drafter
def test_greedy_and_sampled_sequences_share_a_step(name):
    decoder, target, _ = KINDS[name].make(3)
    params = [SamplingParams(max_tokens=20, temperature=temperature) for temperature in (0.0, 0.9, 0.0)]
    sequences = [make_sequence(i, PROMPTS[i], each, seed=i) for i, each in enumerate(params)]
    run(decoder, sequences)
    check_plain(target, sequences[::2])
    assert sequences[1].stats.drafted > 0


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    """No row is held in a cache, and nothing is known of any sequence."""
    known = {}
    for name, kind in KINDS.items():
        decoder, target, drafter = kind.make(4, 0.4, rows=3)
        sequences = make_sequences(lambda _: 30, PROMPTS[:3])
        for seq in sequences:
            decoder.add(seq)
        for _ in range(3):
            decoder.step()
        decoder.cancel(sequences[0])
        finish(decoder, [])
        check_plain(target, sequences[1:])
        if (runner := getattr(drafter, "runner", None)) is not None:
            runner.kv.check()
            assert not runner.kv.num_committed
        if kind.held:
            known[name] = getattr(drafter, kind.held)
    del seq, sequences
    gc.collect()
    assert {name for name, held in known.items() if held} == set()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.cut is not None])
def test_a_cut_lm_head_drafts_only_what_it_has(name):
    ids = np.array([0, 2, 3, 5, 7, 8, 11, 16], np.int32)
    decoder, target, drafter = KINDS[name].make(4, lm_head=CutHead(ids, VOCAB))
    KINDS[name].cut(drafter.runner.executor, ids)
    sequences = make_sequences(lambda _: 30)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    assert {token for event in events for token in event.proposal.tokens} <= set(ids.tolist())
    assert totals(sequences)[1] > 10


@pytest.mark.parametrize("name", ["draft model", "self", "head"])
def test_ids_beyond_the_shared_vocabulary_are_never_drafted(name):
    for temperature in (0.0, 1.0):
        decoder, target, drafter = KINDS[name].make(4, 0.4)
        drafter.vocab_size = 9
        params = SamplingParams(max_tokens=30, temperature=temperature)
        sequences = [make_sequence(i, [3 + i], params, seed=i) for i in range(3)]
        events = run(decoder, sequences)
        assert max(token for event in events for token in event.proposal.tokens) < 9 <= max(sequences[0].output)
        if not temperature:
            check_plain(target, sequences)


class Forgetful(HeadDrafter):
    """Leaves other features in the place of true ones, as a drafter without catch-up does."""

    def note_features(self, sequence, start, features):
        super().note_features(sequence, start, features if start == 0 else np.full_like(features, 1.0))


@pytest.mark.parametrize("name", ["head", "block head"])
def test_wrong_features_are_seen_in_the_acceptance(name):
    """The fakes can fail: features that are not the target's cost acceptance, and nothing else."""
    rates = []
    for kind in (HeadDrafter, Forgetful):
        decoder, target, _ = KINDS[name].make(4, kind=kind)
        sequences = make_sequences(lambda _: 30)
        run(decoder, sequences)
        check_plain(target, sequences)
        drafted, accepted = totals(sequences)
        rates.append(accepted / drafted)
    assert rates[0] == 1.0
    assert rates[1] < 0.5
