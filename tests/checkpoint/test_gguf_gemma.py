"""GGUF files of Gemma 4: targets are those of the folder, in each of the forms that its sizes have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.checkpoint.load import load_checkpoint
from tests.support.models.tiny_assistants import ONE_KEY, SHARED, make_target
from tests.support.models.tiny_gguf_gemma import gemma_file

SIZE = {"vocab_size": 260}
FORMS: dict[str, dict[str, Any]] = {
    "shared-keys": SHARED | {"vocab_size_per_layer_input": 260, "use_double_wide_mlp": True},
    "keys-are-values": ONE_KEY | {"final_logit_softcapping": 30.0},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_target_is_read_whole(form: str, tmp_path: Path) -> None:
    wanted = make_target(**(FORMS[form] | SIZE))
    path = gemma_file(tmp_path / "t.gguf", wanted, named={200: "<|tool_response>", 201: "<turn|>"})
    found = load_checkpoint(str(path))
    state = found.model.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    assert [name for name, value in wanted.state_dict().items() if not torch.equal(state[name], value)] == []
    ids = torch.arange(5, 25)[None]  # more than a window
    with torch.no_grad():
        torch.testing.assert_close(found.model(ids).logits, wanted(ids).logits, rtol=0, atol=1e-6)
    assert set(found.eos_token_ids) == {2, 200, 201}


@pytest.mark.parametrize("form", ["shared-keys", "experts"])
def test_quantized_weights_are_kept(form: str, tmp_path: Path) -> None:
    """The tables of each layer's embedding too, which is most of the small models."""
    size = {"hidden_size_per_layer_input": 16, "head_dim": 32} if form == "shared-keys" else {}
    model = make_target(**(FORMS[form] | SIZE | size))
    path = gemma_file(tmp_path / "t.gguf", model, quantized=lambda _: True)
    kept = load_checkpoint(str(path), keep=True, stream=True).kept
    wanted = {"embed_tokens_per_layer", "per_layer_model_projection"} if size else {"experts.gate_up_proj"}
    assert all(any(part in name for name in kept) for part in wanted | {"embed_tokens", "self_attn.q_proj"})
