"""Drafting with Hydra heads, on fakes whose features hold the tokens that they are of: a wrong feature shows."""

import pytest

from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head import HydraDrafter
from specexport_runtime.drafters.head_kind import KIND
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from tests.support.fakes.drafter_kinds import HEADS, HYDRA_HEADS, hydra_decoder
from tests.support.fakes.heads_on_fakes import (
    check_plain,
    make_sequences,
    totals,
)
from tests.support.fakes.loop import CAPACITY, VOCAB, make_target, run


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
    executor = FakeExecutor(VOCAB, 2, CAPACITY, reads_features=True, **HYDRA_HEADS)
    parts = DrafterParts(ModelRunner(make_target()), None, VOCAB, 3, head=ModelRunner(executor))
    drafter = KIND.make(parts)
    assert isinstance(drafter, HydraDrafter)
    assert drafter.traits.max_lookahead == drafter.traits.default_lookahead == HEADS
    with pytest.raises(SpecexportError, match="needs the engine of Hydra heads"):
        HydraDrafter(ModelRunner(FakeExecutor(VOCAB, 2, CAPACITY, reads_features=True)), vocab_size=VOCAB)
