"""Chunks and indexes that leave nothing of a short text out: the limit is exact, and longer bundles are refused."""

from typing import Any

import pytest
import torch

from specexport.checkpoint.lengths import find_full_attention_length, freeze_length, replace_partial_attention
from specexport.trace.check import check_packed, compute_eager_logits
from specexport.trace.geometry import probe_layers
from specexport.trace.refuse import check_config
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, make_llama, make_model
from tests.support.references.engine_harness import make_checkpoint

LONGEST = 13
CHUNKS = (
    "Llama4:Llama4ForCausalLM:Llama4TextConfig",
    {key: value for key, value in GROUPED.items() if key != "intermediate_size"}
    | {"head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 2}
    | {"attention_chunk_size": LONGEST, "layer_types": ["chunked_attention", "full_attention"]},
)
INDEX = (
    "DeepseekV32",
    ARCHITECTURES["deepseek_v3"][1] | {"index_topk": LONGEST, "index_head_dim": 16, "index_n_heads": 2},
)
MODELS = {"chunks": CHUNKS, "index": INDEX}


def make(name: str) -> Any:
    return make_model(*MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_up_to_the_limit_the_model_is_the_same_and_beyond_it_is_not(name: str) -> None:
    own, held = make(name), make(name)
    assert find_full_attention_length(own) == LONGEST
    assert replace_partial_attention(held, LONGEST)
    for length, same in ((LONGEST, True), (LONGEST + 1, False)):
        ids = [list(range(3, 3 + length))]
        assert bool((abs(compute_eager_logits(own, ids)[0] - compute_eager_logits(held, ids)[0]) < 1e-6).all()) == same


@pytest.mark.parametrize("name", MODELS)
def test_packed_steps_of_a_held_model_are_plain(name: str) -> None:
    checkpoint = make_checkpoint(make(name))
    freeze_length(checkpoint, LONGEST)
    assert checkpoint.max_positions == LONGEST
    check_config(checkpoint.model)
    check_packed(checkpoint.model, probe_layers(checkpoint.model))


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_bundle_is_refused_with_the_length_that_would_do(name: str) -> None:
    checkpoint = make_checkpoint(make(name))
    freeze_length(checkpoint, LONGEST + 1)
    with pytest.raises(UnsupportedModelError, match="it has layers of kind") as caught:
        check_config(checkpoint.model)
    assert caught.value.exit_code == 2
    assert f"--max-model-len {LONGEST}" in str(caught.value.hint)


def test_scores_that_grow_with_the_position_end_the_plain_part() -> None:
    """Llama 4's layers without rotary embedding: the first step changes nothing."""
    model = make("chunks")
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning, layer.self_attn.floor_scale = True, 8
    assert find_full_attention_length(model) == 7
    assert replace_partial_attention(model, 7)
    assert not any(layer.self_attn.attn_temperature_tuning for layer in model.model.layers)


def test_other_models_are_left_alone() -> None:
    model = make_llama()
    assert find_full_attention_length(model) is None
    assert not replace_partial_attention(model, 4)
    assert torch.equal(
        torch.tensor(compute_eager_logits(model, [[3, 4]])[0]),
        torch.tensor(compute_eager_logits(make_llama(), [[3, 4]])[0]),
    )
