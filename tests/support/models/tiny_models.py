"""Makers of tiny random models, shared by the tests of the compiler."""

from pathlib import Path
from typing import Any

VOCAB = 320
KNOWN = 259
"""Tokens that the tokenizer has: no other is ever drafted."""
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = BASE | {"num_key_value_heads": 2}


def make_tokenizer(folder: Path, vocab_size: int = VOCAB) -> None:
    """A byte-level tokenizer without merges: 3 special tokens, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (special + alphabet)[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    fast.save_pretrained(folder)


def make_llama(seed: int = 0, **overrides: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return randomize(LlamaForCausalLM(LlamaConfig(**(GROUPED | overrides))), seed)


WINDOW = 6
"""Small enough that the window cuts both the prefill and the verify step of the tests."""


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# The last two layers read the keys of the first two, and every layer has an embedding of its own.
_GEMMA4 = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 4.0},
}
_SMALL_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_OPT = {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_FALCON = {k: BASE[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
_MLA = {
    **(BASE | _EXPERTS),
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama_tied": ("Llama", GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_rope_llama3": (
        "Llama",
        GROUPED
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama_rope_yarn": ("Llama", GROUPED | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_rope_linear": ("Llama", GROUPED | _rope("linear", factor=4.0)),
    "opt": ("OPT", _OPT | {"max_position_embeddings": 256, "word_embed_proj_dim": 48}),
    "gpt2": ("GPT2:GPT2LMHeadModel", _SMALL_GPT),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 24}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 32}),
    "gemma2": ("Gemma2", GROUPED | {"head_dim": 32, "attn_logit_softcapping": 2.0} | _ALTERNATING),
    "gemma3": ("Gemma3:Gemma3ForCausalLM:Gemma3TextConfig", GROUPED | {"head_dim": 32} | _ALTERNATING),
    "gemma4": ("Gemma4:Gemma4ForCausalLM:Gemma4TextConfig", GROUPED | _GEMMA4),
    "mistral": ("Mistral", GROUPED | {"sliding_window": WINDOW}),
    "phi": ("Phi", BASE),
    "phi3": ("Phi3", GROUPED),
    "gpt_neox": ("GPTNeoX", BASE),
    "olmo2": ("Olmo2", GROUPED),
    "starcoder2": ("Starcoder2", GROUPED | {"sliding_window": WINDOW}),
    "cohere2": ("Cohere2", GROUPED | {"logit_scale": 0.5} | _ALTERNATING),
    "granite": ("Granite", GROUPED | {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "smollm3": ("SmolLM3", GROUPED),
    "stablelm": ("StableLm", GROUPED),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3Moe", GROUPED | _EXPERTS | {"num_experts": 4, "head_dim": 16}),
    "gpt_oss": ("GptOss", GROUPED | {"head_dim": 16, "num_local_experts": 4} | _ALTERNATING),
    "jetmoe": ("JetMoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    "deepseek_v3": ("DeepseekV3", _MLA),
    "gptj": ("GPTJ", _SMALL_GPT | {"rotary_dim": 16}),
    "codegen": ("CodeGen", _SMALL_GPT | {"rotary_dim": 8}),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 96, "n_layer": 2, "n_head": 6}),  # no power of two
    "mpt": ("Mpt", {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 4}),
    "gpt_neo": (
        "GPTNeo",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256}
        | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "bart": (
        "Bart",
        {"vocab_size": VOCAB, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
        | {"max_position_embeddings": 256, "is_decoder": True, "is_encoder_decoder": False},
    ),
    "falcon": ("Falcon", _FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_multi_query": ("Falcon", _FALCON | {"parallel_attn": False}),
}
"""Name to (transformers class prefix, or prefix:model class[:config class], and configuration)."""

_TWO_TABLES = {
    **_rope("longrope", short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)]),
    "original_max_position_embeddings": 32,
}
_LONGROPE = GROUPED | _TWO_TABLES
_STRETCHED = GROUPED | {"max_position_embeddings": 32} | _rope("dynamic", factor=4.0)
_STRETCHED_IN_PART = {
    **(GROUPED | _ALTERNATING | {"head_dim": 16, "max_position_embeddings": 32}),
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_longrope": ("Phi3", _LONGROPE),
    "llama_dynamic": ("Llama", _STRETCHED),
    "gemma3_dynamic": ("Gemma3:Gemma3ForCausalLM:Gemma3TextConfig", _STRETCHED_IN_PART),
}
"""Architectures whose angles depend on the length, beyond 32 positions, as in ARCHITECTURES."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon_alibi": ("Falcon", _FALCON | {"alibi": True}, "adds its ALiBi position bias, rounded to bfloat16, twice"),
    "phi3_longrope": (*BY_LENGTH["phi3_longrope"], "'longrope' depend on the sequence's length, and no length was"),
    "gemma3_dynamic": (*BY_LENGTH["gemma3_dynamic"], "'dynamic' depend on the sequence's length, and no length was"),
    "bert": ("Bert:BertLMHeadModel", BASE | {"is_decoder": False}, "not causal"),
}
"""Name to (classes as in ARCHITECTURES, configuration, and words of the reason)."""

_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_FOUR = GROUPED | {"num_hidden_layers": 4}
_PURE = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 2}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _FOUR | _EXPERTS | _DELTA | {"head_dim": 16, "num_experts": 4}),
    "qwen3_5": ("Qwen3_5:Qwen3_5ForCausalLM:Qwen3_5TextConfig", _FOUR | _DELTA | {"head_dim": 16}),
    "olmo_hybrid": ("OlmoHybrid", _FOUR | _DELTA | {"linear_num_value_heads": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        GROUPED
        | _SSM
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48, "mamba_n_groups": 1}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bamba": ("Bamba", GROUPED | _SSM | {"attn_layer_indices": [1], "mamba_n_groups": 2}),
    "falcon_h1": (
        "FalconH1",
        GROUPED | _SSM | {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    ),
    "nemotron_h": (
        "NemotronH",
        {key: value for key, value in GROUPED.items() if key != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "attention", "moe"], "head_dim": 16, "n_groups": 2, "chunk_size": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_group": 1, "topk_group": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32},
    ),
    "jamba": (
        "Jamba",
        GROUPED
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8},
    ),
    "lfm2": ("Lfm2", GROUPED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "kimi_linear": (
        "KimiLinear",
        GROUPED
        | {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16}}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "minimax": ("MiniMax", GROUPED | {"head_dim": 16, "block_size": 16, "num_local_experts": 4}),
    "recurrent_gemma": (
        "RecurrentGemma",
        GROUPED
        | {"num_hidden_layers": 3, "lru_width": 64, "head_dim": 16, "attention_window_size": WINDOW}
        | {"block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "mamba2": ("Mamba2", _PURE | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "mamba": ("Mamba", _PURE),
    "falcon_mamba": ("FalconMamba", _PURE),
}
"""Architectures with layers that keep a state, as in ARCHITECTURES."""


def make_model(classes: str, config: dict[str, Any], seed: int = 0) -> Any:
    import transformers

    prefix, model_name, config_name, *_ = [*classes.split(":"), "", ""]
    model_class = getattr(transformers, model_name or f"{prefix}ForCausalLM")
    config_class = getattr(transformers, config_name or f"{prefix}Config")
    return randomize(model_class(config_class(**config)), seed)


def randomize(model: Any, seed: int = 0) -> Any:
    """Redraw every weight so that logits spread over several units and no layer is near the identity or zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                weight.add_(0.2 * noise)
            else:
                weight.copy_(0.2 * noise)
    return model.eval()


def calm(model: Any, scale: float) -> Any:
    """The same model with layers that do less: its last token tells the next one, mostly."""
    for name, weight in model.named_parameters():
        if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
            weight.data.mul_(scale)
    return model


def save_checkpoint(model: Any, folder: Path) -> Path:
    """Write ``model`` and a byte tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder
