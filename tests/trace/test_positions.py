"""Decoders that number positions themselves: in packed steps they are told, whatever they would count."""

from typing import Any

import numpy as np
import pytest
import torch

from specexport.checkpoint.lengths import max_positions
from specexport.trace.check import check_packed
from specexport.trace.geometry import probe_layers
from specexport.trace.outside import alibi_slopes
from specexport.trace.quirks import first_position, positions_hook
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_models import ARCHITECTURES, BASE, make_model
from tests.support.models.tiny_traces import tiny_model

ROBERTA = BASE | {"is_decoder": True, "pad_token_id": 1, "type_vocab_size": 2}


def roberta() -> Any:
    return make_model("Roberta:RobertaForCausalLM", ROBERTA)


@pytest.mark.parametrize("make", [roberta, lambda: tiny_model("bart"), lambda: tiny_model("opt")])
def test_packed_tokens_have_the_positions_of_their_own_text(make: Any) -> None:
    model = make()
    check_packed(model, probe_layers(model))


def test_a_wrong_offset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specexport.trace.quirks.first_position", lambda module: first_position(module) and 1)
    model = roberta()
    with pytest.raises(UnsupportedModelError, match="packed tokens change its logits"):
        check_packed(model, probe_layers(model))


def test_rows_before_the_first_tokens_are_no_positions() -> None:
    assert max_positions(roberta()) == BASE["max_position_embeddings"] - 2  # the padding token's id is 1
    assert max_positions(tiny_model("bart")) == 256  # its table has two rows more


def test_the_model_counts_again_afterwards() -> None:
    model = make_model(*ARCHITECTURES["bart"])
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        with positions_hook(model, torch.tensor([0, 1, 2, 0, 1, 2])):
            assert not torch.equal(model(input_ids=ids, use_cache=False).logits, before)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 71, 112])
def test_slopes_of_alibi_are_those_of_transformers(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    found = np.array(alibi_slopes(num_heads), np.float32)
    np.testing.assert_allclose(found, _get_alibi_slopes(num_heads, torch.device("cpu")).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0].numpy(), rtol=1e-5)
