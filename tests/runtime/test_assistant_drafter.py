"""Drafting with an assistant, on fakes whose logits are computed from the target's cache: a stale entry shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head_kind import KIND
from specexport_runtime.drafters.last_feature import AssistantDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv, KvArena
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.chance import examples
from tests.support.heads_on_fakes import (
    PROMPTS,
    check_cancelling,
    check_plain,
    check_sampling_alone,
    make_sequences,
    totals,
)
from tests.support.loop import CAPACITY, VOCAB, make_decoder, make_sequence, make_target, run

NOISES = {"same": 0.0, "good": 0.4, "random": 30.0}


def assistant_decoder(lookahead, noise=0.0, rows=4, *, kind=AssistantDrafter, stages=("head",), **options):
    target = make_target(rows, gives_features=True)
    decoder = make_decoder(target, None, 0, **options)
    head = FakeExecutor(VOCAB, rows, CAPACITY, noise=noise, reads_features=True, lender=target)
    drafter = kind(ModelRunner(head, kv=BorrowedKv(decoder.target.kv)), vocab_size=VOCAB)
    decoder.drafter.drafters["head"] = drafter
    decoder.plan = tuple(DraftStage(name, lookahead) for name in stages)
    return decoder, target, drafter


@pytest.mark.parametrize("lookahead", range(1, 9))
@pytest.mark.parametrize("noise", NOISES)
def test_greedy_text_equals_plain_greedy_and_a_step_is_one_token_a_row(noise, lookahead):
    decoder, target, drafter = assistant_decoder(lookahead, NOISES[noise])
    sequences = make_sequences(lambda i: 5 + 7 * i)
    run(decoder, sequences)
    check_plain(target, sequences)
    drafted, accepted = totals(sequences)
    assert drafted > 50
    assert {"same": accepted == drafted, "good": accepted > drafted / 6, "random": accepted < drafted / 3}[noise]
    shapes = drafter.runner.executor.calls
    assert all(shape.num_tokens == shape.num_logit_rows and shape.max_new_tokens == 1 for shape in shapes)
    assert not drafter.runner.kv.num_committed


@examples(40)
@given(lookahead=st.integers(1, 5), rows=st.integers(1, 4), max_chunk=st.integers(1, 10), lookup=st.booleans())
def test_every_draft_reads_the_verified_entries_whatever_the_chunks_and_the_neighbours(
    lookahead, rows, max_chunk, lookup
):
    stages = ("lookup", "head") if lookup else ("head",)
    decoder, target, _ = assistant_decoder(lookahead, 0.0, rows, stages=stages, max_chunk=max_chunk)
    sequences = make_sequences(lambda i: 4 + 5 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    of_heads = [event for event in events if event.drafted and event.proposal.drafter == "head"]
    assert of_heads
    # A draft may be longer than what is left of its text.
    assert all(event.accepted >= min(event.drafted, len(event.tokens)) - 1 for event in of_heads)


def test_one_entry_too_many_is_refused():
    class Longer(BorrowedKv):
        def kv_len(self, row):
            return super().kv_len(row) + 1

    decoder, _, drafter = assistant_decoder(3)
    drafter.runner.kv = Longer(decoder.target.kv)
    with pytest.raises(SpecexportError, match="the target has 2 entries of a request of 2 tokens"):
        run(decoder, make_sequences(lambda _: 20, PROMPTS[:1]))


def test_sampled_text_does_not_depend_on_the_batch():
    check_sampling_alone(lambda: assistant_decoder(4, 0.4))


def test_greedy_and_sampled_sequences_share_a_step():
    decoder, target, _ = assistant_decoder(3, 0.0)
    params = [SamplingParams(max_tokens=20, temperature=temperature) for temperature in (0.0, 0.9, 0.0)]
    sequences = [make_sequence(i, PROMPTS[i], each, seed=i) for i, each in enumerate(params)]
    run(decoder, sequences)
    check_plain(target, sequences[::2])
    assert sequences[1].stats.drafted > 0


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    decoder, target, drafter = assistant_decoder(4, 0.4, rows=3)
    check_cancelling(decoder, target, drafter, drafter._last)


def test_the_kind_of_an_engine_decides_who_drafts():
    target = make_target()
    head = FakeExecutor(VOCAB, 4, CAPACITY, reads_features=True, lender=target)
    made = KIND.make(DrafterParts(ModelRunner(target), None, VOCAB, 3, head=ModelRunner(head)))
    assert isinstance(made, AssistantDrafter)
    with pytest.raises(SpecexportError, match="needs the engine of an assistant"):
        AssistantDrafter(ModelRunner(target), vocab_size=VOCAB)


def test_borrowed_rows_are_as_long_as_the_lenders_and_never_grow():
    arena = KvArena(2, 10)
    borrowed = BorrowedKv(arena)
    arena.write(1, [4])
    arena.commit(1, 3)
    borrowed.write(0, [1, 1])
    borrowed.commit(1, 9)
    borrowed.move(1, 0)
    borrowed.release(1)
    assert (borrowed.kv_len(0), borrowed.kv_len(1), borrowed.entries(1), borrowed.num_committed) == (0, 3, 3, 0)
    assert arena.kv_len(1) == 3
    borrowed.check()
