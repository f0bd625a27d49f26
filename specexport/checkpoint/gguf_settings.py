"""What GGUF files say of architectures that transformers reads no settings of, as it would configure their models."""

from typing import Any

import numpy as np

from specexport.checkpoint.gguf_reader import architecture, read
from specexport.checkpoint.gguf_rows import tensor_shape
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_ENDLESS = 1e20
_SIGMOID = 2
"""What ``expert_gating_func`` says of routers that score each expert by itself."""


class GgufMetadata:
    """What a file says, by keys after its architecture; CheckpointError for what it must say and does not."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.there = {tensor.name: tensor_shape(tensor) for tensor in reader.tensors}

    def __call__(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise CheckpointError(
                f"the GGUF file does not say {architecture(self._reader)}.{key}.", "fetch or convert the file again."
            )
        return found

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for what is not read."""
        return UnsupportedModelError(
            f"GGUF files of {architecture(self._reader)} with {what} are not read.",
            "give the Hugging Face checkpoint that the file was made from.",
        )

    def check_unscaled(self) -> None:
        """Raise UnsupportedModelError where positions are scaled."""
        kind = self.get("rope.scaling.type", "linear" if self.get("rope.scale_linear") else "none")
        if kind != "none":
            raise self.refuse(f"positions scaled by {kind}")

    def get(self, key: str, default: Any = None) -> Any:
        """The same; ``default`` for what it does not say."""
        found = read(self._reader, f"{architecture(self._reader)}.{key}")
        return default if found is None else found

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        found = read(self._reader, f"tokenizer.ggml.{name}_token_id")
        return None if found is None else int(found)

    def named_tokens(self, *names: str) -> list[int]:
        """The ids of those tokens that there are."""
        tokens = read(self._reader, "tokenizer.ggml.tokens") or []
        return [tokens.index(name) for name in names if name in tokens]

    def read_rotary_fraction(self) -> float:
        """The part of a head that positions turn, by factors that are endless where they turn nothing."""
        factors = next((tensor.data for tensor in self._reader.tensors if tensor.name == "rope_freqs.weight"), None)
        return 1.0 if factors is None else float((np.asarray(factors, np.float64) < _ENDLESS).mean())

    @property
    def num_layers(self) -> int:
        """Layers of the target, without modules."""
        return int(self("block_count") - self.get("nextn_predict_layers", 0))


def _common(metadata: GgufMetadata) -> dict[str, Any]:
    """Settings by names that all of these models have."""
    return {
        "vocab_size": metadata.there.get("token_embd.weight", (0,))[0],
        "max_position_embeddings": metadata("context_length"),
        "hidden_size": metadata("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata("attention.head_count"),
        "rms_norm_eps": metadata("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", 10000.0)},
        **{f"{name}_token_id": metadata.token(key) for name, key in _TOKENS},
    }


_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def _read_routing_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Settings of experts as DeepSeek-V3 scores them; UnsupportedModelError if the file's are scored otherwise."""
    if metadata.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise metadata.refuse(f"expert_gating_func {metadata('expert_gating_func')}")
    return {
        "n_routed_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": metadata.get("expert_group_count") or 1,
        "topk_group": metadata.get("expert_group_used_count") or 1,
    }


def _read_shared_expert_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Settings of experts that all tokens use, and of layers without experts."""
    return {
        "n_shared_experts": metadata("expert_shared_count"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "intermediate_size": metadata("feed_forward_length"),
    }


def read_glm_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """GLM-4.5's, and of what is converted as such."""
    common, heads = _common(metadata), metadata("attention.head_count")
    size = metadata.get("attention.key_length", common["hidden_size"] // heads)
    common["rope_parameters"]["partial_rotary_factor"] = metadata("rope.dimension_count") / size
    return {
        **common,
        **_read_routing_settings(metadata),
        **_read_shared_expert_settings(metadata),
        "model_type": "glm4_moe",
        "head_dim": size,
        "num_key_value_heads": metadata("attention.head_count_kv"),
        "attention_bias": "blk.0.attn_q.bias" in metadata.there,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.there,
    }


def read_deepseek_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """DeepSeek-V3's and GLM-4.7-Flash's; UnsupportedModelError for scaled positions."""
    metadata.check_unscaled()
    turned = metadata("rope.dimension_count")
    size = metadata.get("attention.key_length_mla") or metadata("attention.key_length")
    return {
        **_common(metadata),
        **_read_routing_settings(metadata),
        **_read_shared_expert_settings(metadata),
        "model_type": "deepseek_v3",
        "num_key_value_heads": metadata("attention.head_count"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata("attention.value_length"),
    }


def read_qwen_next_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Qwen3-Next's."""
    common, value_heads = _common(metadata), metadata("ssm.time_step_rank")
    head_size = metadata("attention.key_length")
    common["rope_parameters"]["partial_rotary_factor"] = metadata("rope.dimension_count") / head_size
    attention = [f"blk.{i}.attn_q.weight" in metadata.there for i in range(metadata.num_layers)]
    return {
        **common,
        "model_type": "qwen3_next",
        "layer_types": ["full_attention" if each else "linear_attention" for each in attention],
        "head_dim": metadata("attention.key_length"),
        "num_key_value_heads": metadata("attention.head_count_kv"),
        "intermediate_size": metadata.get("feed_forward_length", 1),  # no layer is without experts
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata("expert_shared_feed_forward_length"),
        "linear_conv_kernel_dim": metadata("ssm.conv_kernel"),
        "linear_key_head_dim": metadata("ssm.state_size"),
        "linear_num_key_heads": metadata("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": metadata("ssm.inner_size") // value_heads,
    }


def read_mimo_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """MiMo-V2's."""
    common, layers = _common(metadata), range(metadata.num_layers)
    windows = [f"blk.{i}.attn_sinks.weight" in metadata.there for i in layers]
    size, heads = metadata("attention.key_length"), metadata("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads * (1 + window) for window in windows]
    plain = next((n for n, window in zip(heads, windows, strict=False) if not window), heads[0] // 2)
    turned = {"rope_type": "default", "partial_rotary_factor": metadata("rope.dimension_count") / size}
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    return {
        **common,
        **_read_routing_settings(metadata),
        "model_type": "mimo_v2_flash",
        "intermediate_size": metadata("feed_forward_length"),
        "head_dim": size,
        "v_head_dim": metadata("attention.value_length"),
        "num_key_value_heads": plain,
        "sliding_window": metadata("attention.sliding_window") + 1,  # a token sees so many, and itself
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in metadata.there else "dense" for i in layers],
        "rope_parameters": {kind: {**turned, "rope_theta": metadata(base)} for kind, base in bases.items()},
        "attention_value_scale": metadata.get("attention.value_scale"),
    }


def read_gemma_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Gemma 4's, of a target and of an assistant; UnsupportedModelError for scaled positions."""
    metadata.check_unscaled()
    common, windows = _common(metadata), metadata("attention.sliding_window_pattern")
    sharing = metadata.get("attention.shared_kv_layers", 0)
    heads, widths = metadata("attention.head_count_kv"), metadata("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads] * len(windows)
    widths = widths if isinstance(widths, list) else [widths] * len(windows)
    of_kind = dict(zip(windows, heads, strict=False))
    # Where all tokens are seen, keys of some models are values too, and they have other numbers of heads
    keys = (i for i in range(len(windows)) if f"blk.{i}.attn_k.weight" in metadata.there)
    alone = any(f"blk.{i}.attn_v.weight" not in metadata.there for i in keys) or len(set(of_kind.values())) > 1
    narrow = metadata.get("embedding_length_per_layer_input", 0)
    ends = [metadata.token("eos")] if metadata.token("eos") is not None else []
    ends += metadata.named_tokens("<turn|>", "<|tool_response>")  # each ends a turn
    found = {
        **common,
        "model_type": "gemma4_text",
        "eos_token_id": ends or None,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "head_dim": metadata("attention.key_length_swa"),
        "global_head_dim": metadata("attention.key_length"),
        "num_key_value_heads": of_kind.get(True, heads[0]),
        "num_global_key_value_heads": of_kind.get(False) if alone else None,
        "attention_k_eq_v": alone,
        "num_kv_shared_layers": sharing,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": metadata("attention.sliding_window"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": narrow,
        "vocab_size_per_layer_input": metadata.there.get("per_layer_token_embd.weight", (0,))[0],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata("rope.freq_base"),
                "partial_rotary_factor": metadata.read_rotary_fraction(),
            },
        },
    }
    if metadata.get("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": metadata("expert_count"),
            "top_k_experts": metadata("expert_used_count"),
            "moe_intermediate_size": metadata("expert_feed_forward_length"),
        }
    return found
