"""GGUF files of targets with MTP modules, as llama.cpp's converter writes them, from the models of ``tiny_modules``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.models.tiny_gguf import add_vocabulary, finish, name_of, setting_of
from tests.support.models.tiny_modules import Module
from tests.support.models.tiny_turns import Modules

_NEXTN = {"embed_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm"}


def _tiled(config: Any, weight: Tensor, size: int, dim: int = 0) -> Tensor:
    """Value heads of ``size`` rows in the order of ggml: the first of each key head, then the second of each."""
    if config.model_type == "qwen3_next":  # keeps the model's order
        return weight
    keys = config.linear_num_key_heads
    split = weight.unflatten(dim, (keys, config.linear_num_value_heads // keys, size))
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _qwen(config: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """What a file of Qwen3.5 or Qwen3-Next has of a tensor of a layer; ``name`` is the model's, within the layer."""
    size = config.linear_value_head_dim
    shared = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    part = name.removesuffix(".weight")
    if ".experts." in name:
        return _experts(name, weight)
    if part.endswith("in_proj_qkvz"):  # first the queries of all key heads, then the keys, …
        values = config.linear_num_value_heads // config.linear_num_key_heads * size
        sizes = [config.linear_key_head_dim] * 2 + [values] * 2
        parts = weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
        *mixed, gate = (each.flatten(0, 1) for each in parts)
        return {"attn_qkv.weight": torch.cat(mixed), "attn_gate.weight": gate}
    if part.endswith("A_log"):
        weight = _tiled(config, -weight.exp(), 1)
    elif part.endswith(("in_proj_qkv", "conv1d")):
        flat = weight.flatten(1)
        weight = torch.cat([flat[:shared], _tiled(config, flat[shared:], size)])
    elif part.endswith("in_proj_z"):
        weight = _tiled(config, weight, size)
    elif part.endswith(("in_proj_a", "in_proj_b", "dt_bias")):
        weight = _tiled(config, weight, 1)
    elif part.endswith("out_proj"):
        weight = _tiled(config, weight, size, dim=1)
    elif part.endswith("norm") and part != "linear_attn.norm":
        weight = weight + 1
    elif part.endswith("shared_expert_gate"):
        weight = weight[0]
    return {name: weight}


def _experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    if "down_proj" in name:
        return {"ffn_down_exps.weight": weight}
    return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), weight.chunk(2, dim=1), strict=True))


def _plain(config: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """What a file has of a tensor of a layer of GLM-4.5, DeepSeek-V3 or MiMo-V2."""
    if ".experts." in name:
        return _experts(name, weight)
    if name == "self_attn.kv_b_proj.weight":
        heads = weight.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
    return {name: weight}


def tensors_of(architecture: str, module: Module | Modules, num_layers: int) -> dict[str, Tensor]:
    """All tensors of a file; ``num_layers`` counts those of the target."""
    centred = isinstance(module, Module) and module.centred
    around = [module.tensors] if isinstance(module, Module) else module.tensors
    config, split = module.target.config, _qwen if architecture.startswith("qwen") else _plain
    found = {
        name_of(architecture, name): value + (centred and "norm" in name)
        for name, value in module.target.state_dict().items()
        if not name.startswith("model.layers.") and not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for name, value in module.deeper.state_dict().items():
        if name.startswith("model.layers."):
            *before, rest = name.split(".", 3)
            parts = split(config, rest, value)
            found |= {name_of(architecture, ".".join([*before, short])): each for short, each in parts.items()}
    for block, tensors in enumerate(around, num_layers):
        for name, short in _NEXTN.items():
            found[f"blk.{block}.nextn.{short}.weight"] = tensors[name] + (centred and name != "fc")
    return found


def round_norms(model: Any) -> None:
    """Give norms weights that are the same when one was added to them and taken off again."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = (weight.data * 1024).round() / 1024


def file_of(path: Path, architecture: str, module: Module | Modules, only: str = "", **changed: Any) -> Path:
    """A file: whole, or ``only`` its "trunk" or its "module"; ``changed`` are settings."""
    layers = module.target.config.num_hidden_layers
    settings = settings_of(architecture, module, layers) | changed
    places = tuple(f"blk.{block}." for block in range(layers, settings["block_count"]))
    wanted: dict[str, Callable[[str], bool]] = {
        "": lambda _: True,
        "trunk": lambda name: not name.startswith(places),
        "module": lambda name: name.startswith((*places, "token_embd", "output")),
    }
    return write(path, architecture, settings, tensors_of(architecture, module, layers), wanted=wanted[only])


def settings_of(architecture: str, module: Module | Modules, num_layers: int) -> dict[str, Any]:
    """Settings of such a file by their keys after the architecture."""
    num_modules = 1 if isinstance(module, Module) else len(module.tensors)
    config, rope = module.target.config, module.target.config.rope_parameters
    found = {
        "block_count": num_layers + num_modules, "nextn_predict_layers": num_modules,
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "feed_forward_length": config.intermediate_size,
    }  # fmt: skip
    if architecture == "mimo2":
        return found | _scored(config) | _of_mimo(config, num_modules)
    found["rope.freq_base"] = float(rope["rope_theta"])
    if architecture == "deepseek2":
        return found | _scored(config) | _of_latent(config)
    size = config.head_dim
    found |= {"attention.key_length": size, "attention.value_length": size}
    found["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
    if architecture == "glm4moe":
        return found | _scored(config) | _of_shared(config)
    if hasattr(config, "num_experts"):
        del found["feed_forward_length"]
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    if architecture != "qwen3next":
        found["rope.dimension_sections"] = [1, 1, 1, 0]
    return found | {
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def _scored(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2,
    }


def _of_shared(config: Any) -> dict[str, Any]:
    return {
        "expert_shared_count": config.n_shared_experts, "leading_dense_block_count": config.first_k_dense_replace,
    }  # fmt: skip


def _of_latent(config: Any) -> dict[str, Any]:
    """As llama.cpp computes it: one key head of the latent's size."""
    return _of_shared(config) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _of_mimo(config: Any, num_modules: int) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config.layer_types] + [True] * num_modules
    ropes = config.rope_parameters
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (1 + window) for window in windows],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": windows,
        "attention.value_scale": float(config.attention_value_scale),
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * ropes["full_attention"]["partial_rotary_factor"]),
    }


def write(
    path: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], *,
    wanted: Callable[[str], bool] = lambda _: True, quantized: Callable[[str], bool] = lambda _: False,
    named: Mapping[int, str] = {},
) -> Path:  # fmt: skip
    """Write the ``wanted`` tensors of a file with a byte vocabulary; matrices that are ``quantized`` as Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        setting_of(writer, value)(f"{architecture}.{key}", value)
    add_vocabulary(writer, tensors["token_embd.weight"].shape[0], named)
    for name, value in tensors.items():
        stored = np.ascontiguousarray(value.detach().float().numpy())
        if wanted(name) and quantized(name) and stored.ndim > 1 and stored.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        elif wanted(name):
            writer.add_tensor(name, stored)
    finish(writer)
    return path
