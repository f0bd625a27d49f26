"""Drafting with Medusa heads, on fakes whose features hold the tokens that they are of: a wrong feature shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.drafters.head_kind import KIND
from specexport_runtime.drafters.last_feature import MedusaDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sampling.params import SamplingParams
from tests.support.chance import examples
from tests.support.heads_on_fakes import (
    PROMPTS,
    check_cancelling,
    check_plain,
    check_sampling_alone,
    decoder_with,
    make_sequences,
    totals,
)
from tests.support.loop import CAPACITY, VOCAB, make_sequence, make_target, run

HEADS = 3
NOISES = {"same": 0.0, "good": 0.4, "random": 30.0}


def medusa_decoder(lookahead, noise=0.0, rows=4, *, lm_head=None, **options):
    return decoder_with(
        lambda runner: MedusaDrafter(runner, vocab_size=VOCAB, head=lm_head),
        lookahead,
        noise,
        rows,
        fake={"num_draft_heads": HEADS},
        **options,
    )


@pytest.mark.parametrize("lookahead", range(1, 6))
@pytest.mark.parametrize("noise", NOISES)
def test_greedy_text_equals_plain_greedy_and_a_draft_is_one_step(noise, lookahead):
    decoder, target, drafter = medusa_decoder(lookahead, NOISES[noise])
    sequences = make_sequences(lambda i: 5 + 7 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    drafted, accepted = totals(sequences)
    assert drafted > 50
    assert {"same": accepted == drafted, "good": accepted > drafted / 4, "random": accepted < drafted / 3}[noise]
    assert max(event.drafted for event in events) == min(lookahead, HEADS)
    shapes = drafter.runner.executor.calls
    assert len(shapes) <= len(target.calls)
    assert all(shape.num_tokens == shape.num_logit_rows for shape in shapes), "nothing is read but what drafts"
    assert not drafter.runner.kv.num_committed


@examples(40)
@given(lookahead=st.integers(1, 5), rows=st.integers(1, 4), max_chunk=st.integers(1, 10), lookup=st.booleans())
def test_every_draft_is_made_of_the_last_true_feature_whatever_the_chunks_and_the_neighbours(
    lookahead, rows, max_chunk, lookup
):
    stages = ("lookup", "head") if lookup else ("head",)
    decoder, target, _ = medusa_decoder(lookahead, 0.0, rows, stages=stages, max_chunk=max_chunk)
    sequences = make_sequences(lambda i: 4 + 5 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    of_heads = [event for event in events if event.drafted and event.proposal.drafter == "head"]
    assert of_heads
    # A draft may be longer than what is left of its text.
    assert all(event.accepted >= min(event.drafted, len(event.tokens)) - 1 for event in of_heads)
    if not lookup:
        drafted, accepted = totals(sequences)
        assert accepted == drafted > 0


def test_sampled_text_does_not_depend_on_the_batch():
    check_sampling_alone(lambda: medusa_decoder(4, 0.4))


def test_greedy_and_sampled_sequences_share_a_step():
    decoder, target, _ = medusa_decoder(3, 0.0)
    params = [SamplingParams(max_tokens=20, temperature=temperature) for temperature in (0.0, 0.9, 0.0)]
    sequences = [make_sequence(i, PROMPTS[i], each, seed=i) for i, each in enumerate(params)]
    run(decoder, sequences)
    check_plain(target, sequences[::2])
    assert sequences[1].stats.drafted > 0


def test_cut_lm_heads_draft_only_what_they_have():
    ids = np.array([0, 2, 3, 5, 7, 8, 11, 16], np.int32)
    decoder, target, drafter = medusa_decoder(3, 0.0, lm_head=CutHead(ids, VOCAB))
    executor = drafter.runner.executor
    guess = executor._guess

    def cut(*given):
        return {row: logits[ids] for row, logits in guess(*given).items()}

    executor._guess = cut
    sequences = make_sequences(lambda _: 30)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    assert {token for event in events for token in event.proposal.tokens} <= set(ids.tolist())
    assert totals(sequences)[1] > 10


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    decoder, target, drafter = medusa_decoder(4, 0.4, rows=3)
    check_cancelling(decoder, target, drafter, drafter._last)


def test_the_kind_of_an_engine_decides_who_drafts():
    def made(**kind):
        executor = FakeExecutor(VOCAB, 2, CAPACITY, reads_features=True, **kind)
        return KIND.make(DrafterParts(ModelRunner(make_target()), None, VOCAB, 3, head=ModelRunner(executor)))

    medusa = made(num_draft_heads=2)
    assert isinstance(medusa, MedusaDrafter)
    assert medusa.traits.max_lookahead == medusa.traits.default_lookahead == 2
    assert isinstance(made(), HeadDrafter)
    with pytest.raises(SpecexportError, match="needs the engine of Medusa heads"):
        MedusaDrafter(ModelRunner(make_target()), vocab_size=VOCAB)
