"""Drafting with an assistant, on fakes whose logits are computed from the target's cache: a stale entry shows."""

import pytest

from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head_kind import KIND
from specexport_runtime.drafters.last_feature import AssistantDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv, KvArena
from tests.support.fakes.drafter_kinds import assistant_decoder
from tests.support.fakes.heads_on_fakes import (
    PROMPTS,
    make_sequences,
)
from tests.support.fakes.loop import CAPACITY, VOCAB, make_target, run


def test_one_entry_too_many_is_refused():
    class Longer(BorrowedKv):
        def kv_len(self, row):
            return super().kv_len(row) + 1

    decoder, _, drafter = assistant_decoder(3)
    drafter.runner.kv = Longer(decoder.target.kv)
    with pytest.raises(SpecexportError, match="the target has 2 entries of a request of 2 tokens"):
        run(decoder, make_sequences(lambda _: 20, PROMPTS[:1]))


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
