"""Drafting with Hydra heads, on fakes whose features hold the tokens that they are of: a wrong feature shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head import HydraDrafter
from specexport_runtime.drafters.head_kind import KIND
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
    check_true_features,
    decoder_with,
    make_sequences,
    totals,
)
from tests.support.loop import CAPACITY, VOCAB, make_sequence, make_target, run

HEADS = 3
NOISES = {"same": 0.0, "good": 0.4, "random": 30.0}
FAKE = {"num_draft_heads": HEADS, "reads_draft": True}


def hydra_decoder(lookahead=3, noise=0.0, rows=4, **options):
    return decoder_with(
        lambda runner: HydraDrafter(runner, vocab_size=VOCAB), lookahead, noise, rows, fake=FAKE, **options
    )


@pytest.mark.parametrize("lookahead", range(1, 6))
@pytest.mark.parametrize("noise", NOISES)
def test_greedy_text_equals_plain_greedy_and_a_draft_token_is_a_step(noise, lookahead):
    decoder, target, drafter = hydra_decoder(lookahead, NOISES[noise])
    sequences = make_sequences(lambda i: 5 + 7 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    drafted, accepted = totals(sequences)
    assert drafted > 50
    assert {"same": accepted == drafted, "good": accepted > drafted / 4, "random": accepted < drafted / 3}[noise]
    assert max(event.drafted for event in events) == min(lookahead, HEADS)
    calls = drafter.runner.executor.calls
    assert max(shape.num_tokens for shape in calls if shape.num_seqs == 1) >= min(lookahead, HEADS)
    assert all(shape.num_logit_rows <= shape.num_seqs for shape in calls), "one head a row, of all that it reads"
    assert not drafter.runner.kv.num_committed


@examples(40)
@given(
    lookahead=st.integers(1, 5),
    rows=st.integers(1, 4),
    max_chunk=st.integers(1, 10),
    held=st.integers(1, 12),
    lookup=st.booleans(),
)
def test_every_draft_is_made_of_true_features_whatever_the_chunks_and_the_neighbours(
    lookahead, rows, max_chunk, held, lookup
):
    check_true_features(hydra_decoder, held, lookup=lookup, lookahead=lookahead, rows=rows, max_chunk=max_chunk)


def test_sampled_text_does_not_depend_on_the_batch():
    check_sampling_alone(lambda: hydra_decoder(3, 0.4))


def test_greedy_and_sampled_sequences_share_a_step():
    decoder, target, _ = hydra_decoder()
    params = [SamplingParams(max_tokens=20, temperature=temperature) for temperature in (0.0, 0.9, 0.0)]
    sequences = [make_sequence(i, PROMPTS[i], each, seed=i) for i, each in enumerate(params)]
    run(decoder, sequences)
    check_plain(target, sequences[::2])
    assert sequences[1].stats.drafted > 0


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    decoder, target, drafter = hydra_decoder(3, 0.4, rows=3)
    check_cancelling(decoder, target, drafter, drafter._held)


def test_a_head_that_is_fed_another_draft_guesses_worse(monkeypatch):
    rates = []
    for wrong in (False, True):
        decoder, target, _ = hydra_decoder()
        if wrong:  # as if each head read the newest token alone
            pending = HydraDrafter._pending

            def alone(self, draft, pending=pending):
                work = pending(self, draft)
                return work._replace(tokens=[work.tokens[0]] * len(work.tokens)) if draft.tokens else work

            monkeypatch.setattr(HydraDrafter, "_pending", alone)
        sequences = make_sequences(lambda _: 30)
        run(decoder, sequences)
        check_plain(target, sequences)
        drafted, accepted = totals(sequences)
        rates.append(accepted / drafted)
    assert rates[0] == 1.0
    assert rates[1] < 0.7


def test_the_kind_of_an_engine_decides_who_drafts():
    executor = FakeExecutor(VOCAB, 2, CAPACITY, reads_features=True, **FAKE)
    parts = DrafterParts(ModelRunner(make_target()), None, VOCAB, 3, head=ModelRunner(executor))
    drafter = KIND.make(parts)
    assert isinstance(drafter, HydraDrafter)
    assert drafter.traits.max_lookahead == drafter.traits.default_lookahead == HEADS
    with pytest.raises(SpecexportError, match="needs the engine of Hydra heads"):
        HydraDrafter(ModelRunner(FakeExecutor(VOCAB, 2, CAPACITY, reads_features=True)), vocab_size=VOCAB)
