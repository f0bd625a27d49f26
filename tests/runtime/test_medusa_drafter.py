"""Drafting with Medusa heads, on fakes whose features hold the tokens that they are of: a wrong feature shows."""

import pytest

from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.drafters.head_kind import KIND
from specexport_runtime.drafters.last_feature import MedusaDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from tests.support.fakes.loop import CAPACITY, VOCAB, make_target


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
