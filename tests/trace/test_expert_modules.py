"""Experts that are answered by class give what their own loops give, and are themselves again afterwards."""

from typing import Any

import pytest
import torch

from specexport.trace.experts import replace_expert_forwards
from tests.support.models.tiny_models import BASE, GROUPED, make_model

_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dbrx": (
        "Dbrx",
        {"vocab_size": 320, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}}
        | {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {"vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 96}
        | {"n_routed_experts": 3, "zero_expert_num": 2, "moe_topk": 3, "expert_ffn_hidden_size": 48, "head_dim": 8}
        | _LATENT,
    ),
    "llama4": (
        "Llama4:Llama4ForCausalLM:Llama4TextConfig",
        GROUPED | {"head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_same(name: str, grouped: bool) -> None:
    model, ids = make_model(*MODELS[name]), torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        with replace_expert_forwards(model, grouped=grouped):
            assert sum("forward" in vars(module) for module in model.modules()) == 2
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_activation_is_left_alone() -> None:
    classes, config = MODELS["llama4"]
    model = make_model(classes, config | {"hidden_act": "gelu"})
    with replace_expert_forwards(model, grouped=True):
        assert not any("forward" in vars(module) for module in model.modules())


def test_base_models_have_none() -> None:
    model = make_model("Llama", BASE)
    with replace_expert_forwards(model, grouped=True):
        assert not any("forward" in vars(module) for module in model.modules())
