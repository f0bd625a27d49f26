"""GGUF files of Gemma-4 targets and assistants, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.models import tiny_gguf_modules
from tests.support.models.tiny_gguf import name_of

_PROJECTIONS = {f"{way}_projection.weight": f"nextn.{way}_projection.weight" for way in ("pre", "post")}


def gemma_file(path: Path, model: Any, changed: Mapping[str, Any] = {}, **how: Any) -> Path:
    config = model.config.get_text_config()
    found = {
        _PROJECTIONS.get(name) or name_of("gemma4", name): value
        for name, value in model.state_dict().items()
        if name in _PROJECTIONS or name.startswith("model.")
    }
    turned = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    size = _per_kind(config)["full_attention"].head_dim
    ones = int(size * turned / 2)
    found["rope_freqs.weight"] = torch.tensor([1.0] * ones + [1e30] * (size // 2 - ones))
    is_target = not hasattr(model.config, "backbone_hidden_size")
    settings = settings_of(config, size) | (
        {} if is_target else {
            "embedding_length_out": model.config.backbone_hidden_size, "nextn_predict_layers": config.num_hidden_layers,
        }
    )  # fmt: skip
    settings = {key: value for key, value in (settings | dict(changed)).items() if value is not None}
    return tiny_gguf_modules.write(path, "gemma4" if is_target else "gemma4-assistant", settings, found, **how)


def settings_of(config: Any, full_size: int) -> dict[str, Any]:
    """Settings of a file by their keys after the architecture."""
    windows, ropes = [kind == "sliding_attention" for kind in config.layer_types], config.rope_parameters
    each = _per_kind(config)
    counts = [each[kind].num_key_value_heads for kind in config.layer_types]
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": counts if len(set(counts)) > 1 else counts[0],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": full_size,
        "attention.key_length_swa": each["sliding_attention"].head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windows,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }
    if config.final_logit_softcapping:
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        found["feed_forward_length"] = [config.intermediate_size * (1 + (i >= first)) for i in range(len(windows))]
    if config.enable_moe_block:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return found


def _per_kind(config: Any) -> dict[str, Any]:
    return {kind: config.per_layer_config[i] for i, kind in enumerate(config.layer_types)}
