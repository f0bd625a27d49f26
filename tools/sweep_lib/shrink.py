"""A tiny configuration of any architecture: its own defaults with small sizes, by the names of the fields."""

import re
from typing import Any

from tests.support.models.tiny_models import VOCAB, WINDOW

MAX_LAYERS = 8

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(?!make_).*vocab(_size.*)?$", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length", 256),
    (r"max_target_positions|max_source_positions|original_max_position_embeddings", 256),
    (r"num_experts_per_tok(en)?|num_experts_per_token|experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts", 2),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|num_routed_experts|zero_expert_num", 4),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"n_group|topk_group|index_n_groups|num_expert_group", 1),
    (r"(linear_)?.*(num_key_value_heads|num_kv_heads|num_query_groups|n_kv_heads)$", 2),
    (r"linear_num_key_heads", 2),
    (r"mamba_n_groups|mamba_ngroups|n_groups", 2),
    (r"mamba_(n_heads|num_heads)|n_mamba_heads", 8),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"mamba_d_ssm", 128),
    (r"(.*_)?(num_)?(attention_|lin_)?(n_)?heads?$|n_head|num_lin_heads", 4),
    (r"num_.*_heads|.*_n_heads", 4),
    (r"qk_rope_head_dim|rotary_dim|linear_key_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"(.*_)?head_(dim|size)|head_dim|dim_head|d_head|d_kv|kv_channels|linear_head_dim|attention_head_size", 16),
    (r"query_pre_attn_scalar", 16),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r".*(time_step_rank|dt_rank|_lora_rank|lora_rank)|.*_rank|.*lowrank", 16),
    (r"(mamba_)?chunk_size|block_multiple_of", 16),
    (r"attention_chunk_size|index_topk", 128),  # of every text of the sweep
    (r"index_block_size|index_topk_blocks", 4),
    (r"sliding_window(_size)?|attention_window_size|local_attention|window_size|local_attention_window_len", WINDOW),
    (r"hidden_size_per_layer_input", 8),
    (r"hidden_size|d_model|n_embd|dim_model|embedding_(dim|size)|emb_dim|word_embed_proj_dim|.*_embedding_size", 64),
    (r"attention_hidden_size|lru_width|(text_)?hidden_dim|backbone_hidden_size|router_hidden_size|.*_embed_dim", 64),
    (r"moe_.*intermediate_size|.*shared_.*intermediate_size|expert_ffn_hidden_size", 48),
    (r"(.*_)?intermediate_size(_.*)?|ffn_hidden_size|.*ffn_dim|d_ff|dff|dim_ff|d_inner|n_inner|feed_forward_size", 96),
    (r"image_size", 32),
    (r"patch_size", 16),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_hash_layers", 1),
    (r"moe_layer_end_index", 8),
    (r"num_kv_shared_layers", 2),
    (r"num_nextn_predict_layers|num_mtp_modules|mtp_num_hidden_layers", 0),
    (r"(num_)?(hidden_|encoder_|decoder_)*layers|n_layers?|num_blocks|num_layers_per_stack", 2),
)
_LAYERS = re.compile(r"num_hidden_layers|num_layers|n_layers?|decoder_layers|num_decoder_layers|num_blocks")
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 1},
    "bailing_hybrid": {"layer_group_size": 2, "num_expert_group": 1, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "hrm_text": {"num_hidden_layers": 16},  # 2 layers, 3 low cycles and a high one, twice
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        **{"ple_embed_dim": 64, "ngram_vocab_size_base": 100, "split_ngram_parts": 4},
        **{"make_ngram_vocab_size_divisible_by": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4},
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xlnet": {"n_head": 4, "d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1, 4],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
"""What the names do not tell, by architecture."""


def shrink(name: str, repeats: int = 1) -> Any:
    """A small configuration of an architecture, by its ``model_type``; raises what its configuration class raises.

    The layers that have every kind come ``repeats`` times.
    """
    from transformers import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[name], OVERRIDES.get(name, {}), repeats)


def _shrunk(kind: Any, overrides: dict[str, Any], repeats: int) -> Any:
    default = kind()
    plain = default.to_dict()  # some fields cannot be read as attributes where layers have their own sizes
    fields = _small_sizes({key: value for key, value in plain.items() if key not in kind.sub_configs})
    for key in ("is_decoder", "is_encoder_decoder"):
        if hasattr(default, key):
            fields[key] = key == "is_decoder"
    layers = next((key for key in fields if _LAYERS.fullmatch(key)), None)
    if layers is not None:
        fields |= _enough_layers(default, layers)
    for key, named in kind.sub_configs.items():
        inner = getattr(default, key, None)  # where the class is AutoConfig, the default says which it is
        sub = named if getattr(named, "model_type", None) is not None else type(inner)
        if sub is not type(None):
            fields[key] = _shrunk(sub, overrides.get(key, {}), repeats).to_dict()
    fields |= {key: value for key, value in overrides.items() if key not in kind.sub_configs}
    return kind(**fields | (_repeated(plain | fields, layers, repeats) if repeats > 1 else {}))


def _repeated(fields: dict[str, Any], layers: str | None, repeats: int) -> dict[str, Any]:
    """All layers several times, with what is said of each."""
    kinds = fields.get("layers_block_type", ()) if layers is None else fields[layers]
    count = int(fields.get("num_hidden_layers", len(kinds) if isinstance(kinds, (list, tuple)) else kinds))
    found: dict[str, Any] = {
        key: value * repeats
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == count and re.search("layer|types|intermediate|pattern", key)
    }
    if "attention_types" in fields:  # GPT-Neo's lists with how often they come
        found["attention_types"] = [[names, times * repeats] for names, times in fields["attention_types"]]
    return found | {key: count * repeats for key in ("num_hidden_layers", layers) if key in fields}


def _small_sizes(plain: dict[str, Any]) -> dict[str, Any]:
    """Small values for the fields of a configuration that have sizes or token ids."""
    fields: dict[str, Any] = {}
    special = 0
    for key, value in plain.items():
        if key in _IDS:
            fields[key] = _IDS[key]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif re.search(r"token_(id|index)$", key):
            special += 1
            fields[key] = VOCAB - special
        elif (size := _small(key)) is not None:
            fields[key] = size if key.endswith("head_dim") else min(size, value)
    if plain.get("num_key_value_heads", 0) == plain.get("num_attention_heads"):
        fields["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in fields and plain.get("head_dim") == plain["qk_rope_head_dim"]:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if plain.get("head_dim", 0) is None:
        fields["head_dim"] = 16
    return fields


def _small(key: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)


def _enough_layers(default: Any, key: str) -> dict[str, Any]:
    """The first layers that have every kind; or a list with one of each kind, where the kinds come late."""
    lists = {
        name: value
        for name in ("layer_types", "mlp_layer_types", "layers_block_type")
        if isinstance(value := getattr(default, name, None), list) and value
    }
    if not lists:
        return {key: 2}
    kinds = list(zip(*lists.values(), strict=False))
    count = next((i + 1 for i in range(len(kinds)) if set(kinds[: i + 1]) == set(kinds)), len(kinds))
    if count <= MAX_LAYERS:
        return {key: max(count, 2)}
    chosen = sorted({kinds.index(kind) for kind in kinds})
    return {key: len(chosen)} | {name: [value[i] for i in chosen] for name, value in lists.items()}
