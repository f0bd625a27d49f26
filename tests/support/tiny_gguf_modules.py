"""GGUF files of targets with MTP modules, as llama.cpp's converter writes them, from the models of ``tiny_modules``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.tiny_gguf import BLOCK, NAMES
from tests.support.tiny_modules import Module

_QWEN = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_NEXTN = {"embed_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm"}


def _tiled(config: Any, weight: Tensor, size: int, dim: int = 0) -> Tensor:
    """Value heads of ``size`` rows in the order of ggml: the first of each key head, then the second of each."""
    keys = config.linear_num_key_heads
    split = weight.unflatten(dim, (keys, config.linear_num_value_heads // keys, size))
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _qwen(config: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """What a file of Qwen3.5 has of a tensor of a layer; ``name`` is the model's, within the layer."""
    size = config.linear_value_head_dim
    shared = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if ".experts." in name:
        if "down_proj" in name:
            return {"ffn_down_exps.weight": weight}
        return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), weight.chunk(2, dim=1), strict=True))
    part, _, ending = name.rpartition(".")
    if ending == "A_log":
        return {"ssm_a": _tiled(config, -weight.exp(), 1)}
    if ending == "dt_bias":
        return {"ssm_dt.bias": _tiled(config, weight, 1)}
    if part.endswith(("in_proj_qkv", "conv1d")):
        flat = weight.flatten(1) if part.endswith("conv1d") else weight
        weight = torch.cat([flat[:shared], _tiled(config, flat[shared:], size)])
    elif part.endswith("in_proj_z"):
        weight = _tiled(config, weight, size)
    elif part.endswith(("in_proj_a", "in_proj_b")):
        weight = _tiled(config, weight, 1)
    elif part.endswith("out_proj"):
        weight = _tiled(config, weight, size, dim=1)
    elif part.endswith("norm") and part != "linear_attn.norm":
        weight = weight + 1
    elif part.endswith("shared_expert_gate"):
        weight = weight[0]
    return {f"{_QWEN[part]}.{ending}": weight}


def qwen_tensors(module: Module, num_layers: int) -> dict[str, Tensor]:
    """All tensors of a file of Qwen3.5; ``num_layers`` counts those of the target."""
    config = module.target.config
    found = {
        NAMES[name]: value + ("norm" in name)
        for name, value in module.target.state_dict().items()
        if name in NAMES and not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for name, value in module.deeper.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            found |= {f"blk.{layer}.{short}": each for short, each in _qwen(config, rest, value).items()}
    for name, short in _NEXTN.items():
        value = module.tensors[name]
        found[f"blk.{num_layers}.nextn.{short}.weight"] = value if name == "fc" else value + 1
    return found


def round_norms(model: Any) -> None:
    """Give norms weights that are the same when one was added to them and taken off again."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = (weight.data * 1024).round() / 1024


def qwen_file(path: Path, architecture: str, module: Module, only: str = "", **changed: Any) -> Path:
    """A file of Qwen3.5: whole, or ``only`` its "trunk" or its "module"; ``changed`` are settings."""
    layers = module.target.config.num_hidden_layers
    settings, place = qwen_settings(module, layers) | changed, f"blk.{layers}."
    wanted: dict[str, Callable[[str], bool]] = {
        "": lambda _: True,
        "trunk": lambda name: not name.startswith(place),
        "module": lambda name: name.startswith((place, "token_embd", "output")),
    }
    return write(path, architecture, settings, qwen_tensors(module, layers), wanted=wanted[only])


def qwen_settings(module: Module, num_layers: int) -> dict[str, Any]:
    """Settings of such a file by their keys behind the architecture."""
    config, rope = module.target.config, module.target.config.rope_parameters
    found = {
        "block_count": num_layers + 1,
        "nextn_predict_layers": 1,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [1, 1, 1, 0],
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if hasattr(config, "num_experts"):
        return found | {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return found | {"feed_forward_length": config.intermediate_size}


def write(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    quantized: Callable[[str], bool] = lambda _: False,
) -> Path:
    """Write those tensors of a file whose names are ``wanted``, with a byte vocabulary.

    Matrices whose names are ``quantized`` are Q8_0.
    """
    import gguf
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, architecture)
    adders = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
    for key, value in settings.items():
        adders[type(value)](f"{architecture}.{key}", value)
    size = tensors["token_embd.weight"].shape[0]
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"][:size]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + [f"<extra{i}>" for i in range(size - len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in tensors.items():
        stored = np.ascontiguousarray(value.detach().float().numpy())
        if wanted(name) and quantized(name) and stored.ndim > 1 and stored.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        elif wanted(name):
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
