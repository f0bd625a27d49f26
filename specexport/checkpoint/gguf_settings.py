"""What GGUF files say of architectures that transformers reads no settings of, as it would configure their models."""

from typing import Any

import numpy as np

from specexport.checkpoint.gguf_reader import architecture, read
from specexport.checkpoint.gguf_rows import tensor_shape
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_ENDLESS = 1e20
_SIGMOID = 2
"""What ``expert_gating_func`` says of routers that score each expert by itself."""


class Said:
    """What a file says, by keys behind its architecture; CheckpointError for what it must say and does not."""

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

    def turned_part(self) -> float:
        """The part of a head that positions turn, by factors that are endless where they turn nothing."""
        factors = next((tensor.data for tensor in self._reader.tensors if tensor.name == "rope_freqs.weight"), None)
        return 1.0 if factors is None else float((np.asarray(factors, np.float64) < _ENDLESS).mean())

    @property
    def num_layers(self) -> int:
        """Layers of the target, without modules."""
        return int(self("block_count") - self.get("nextn_predict_layers", 0))


def _common(said: Said) -> dict[str, Any]:
    """Settings by names that all of these models have."""
    return {
        "vocab_size": said.there.get("token_embd.weight", (0,))[0],
        "max_position_embeddings": said("context_length"),
        "hidden_size": said("embedding_length"),
        "num_hidden_layers": said.num_layers,
        "num_attention_heads": said("attention.head_count"),
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": said.get("rope.freq_base", 10000.0)},
        **{f"{name}_token_id": said.token(key) for name, key in _TOKENS},
    }


_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def _scored(said: Said) -> dict[str, Any]:
    """Settings of experts as DeepSeek-V3 scores them; UnsupportedModelError if the file's are scored otherwise."""
    if said.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise said.refuse(f"expert_gating_func {said('expert_gating_func')}")
    return {
        "n_routed_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "moe_intermediate_size": said("expert_feed_forward_length"),
        "routed_scaling_factor": said.get("expert_weights_scale", 1.0),
        "norm_topk_prob": said.get("expert_weights_norm", False),
        "n_group": said.get("expert_group_count") or 1,
        "topk_group": said.get("expert_group_used_count") or 1,
    }


def _shared(said: Said) -> dict[str, Any]:
    """Settings of experts that all tokens use, and of layers without experts."""
    return {
        "n_shared_experts": said("expert_shared_count"),
        "first_k_dense_replace": said.get("leading_dense_block_count", 0),
        "intermediate_size": said("feed_forward_length"),
    }


def glm(said: Said) -> dict[str, Any]:
    """GLM-4.5's, and of what is converted as such."""
    common, heads = _common(said), said("attention.head_count")
    size = said.get("attention.key_length", common["hidden_size"] // heads)
    common["rope_parameters"]["partial_rotary_factor"] = said("rope.dimension_count") / size
    return {
        **common,
        **_scored(said),
        **_shared(said),
        "model_type": "glm4_moe",
        "head_dim": size,
        "num_key_value_heads": said("attention.head_count_kv"),
        "attention_bias": "blk.0.attn_q.bias" in said.there,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in said.there,
    }


def deepseek(said: Said) -> dict[str, Any]:
    """DeepSeek-V3's and GLM-4.7-Flash's; UnsupportedModelError for scaled positions."""
    said.check_unscaled()
    turned = said("rope.dimension_count")
    size = said.get("attention.key_length_mla") or said("attention.key_length")
    return {
        **_common(said),
        **_scored(said),
        **_shared(said),
        "model_type": "deepseek_v3",
        "num_key_value_heads": said("attention.head_count"),
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "kv_lora_rank": said("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": said.get("attention.value_length_mla") or said("attention.value_length"),
    }


def qwen_next(said: Said) -> dict[str, Any]:
    """Qwen3-Next's."""
    common, value_heads = _common(said), said("ssm.time_step_rank")
    common["rope_parameters"]["partial_rotary_factor"] = said("rope.dimension_count") / said("attention.key_length")
    attention = [f"blk.{i}.attn_q.weight" in said.there for i in range(said.num_layers)]
    return {
        **common,
        "model_type": "qwen3_next",
        "layer_types": ["full_attention" if each else "linear_attention" for each in attention],
        "head_dim": said("attention.key_length"),
        "num_key_value_heads": said("attention.head_count_kv"),
        "intermediate_size": said.get("feed_forward_length", 1),  # no layer is without experts
        "num_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "moe_intermediate_size": said("expert_feed_forward_length"),
        "shared_expert_intermediate_size": said("expert_shared_feed_forward_length"),
        "linear_conv_kernel_dim": said("ssm.conv_kernel"),
        "linear_key_head_dim": said("ssm.state_size"),
        "linear_num_key_heads": said("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": said("ssm.inner_size") // value_heads,
    }


def mimo(said: Said) -> dict[str, Any]:
    """MiMo-V2's."""
    common, layers = _common(said), range(said.num_layers)
    windows = [f"blk.{i}.attn_sinks.weight" in said.there for i in layers]
    size, heads = said("attention.key_length"), said("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads * (1 + window) for window in windows]
    plain = next((n for n, window in zip(heads, windows, strict=False) if not window), heads[0] // 2)
    turned = {"rope_type": "default", "partial_rotary_factor": said("rope.dimension_count") / size}
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    return {
        **common,
        **_scored(said),
        "model_type": "mimo_v2_flash",
        "intermediate_size": said("feed_forward_length"),
        "head_dim": size,
        "v_head_dim": said("attention.value_length"),
        "num_key_value_heads": plain,
        "sliding_window": said("attention.sliding_window") + 1,  # a token sees so many, and itself
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in said.there else "dense" for i in layers],
        "rope_parameters": {kind: {**turned, "rope_theta": said(base)} for kind, base in bases.items()},
        "attention_value_scale": said.get("attention.value_scale"),
    }


def gemma(said: Said) -> dict[str, Any]:
    """Gemma 4's, of a target and of an assistant; UnsupportedModelError for scaled positions."""
    said.check_unscaled()
    common, windows = _common(said), said("attention.sliding_window_pattern")
    sharing = said.get("attention.shared_kv_layers", 0)
    heads, widths = said("attention.head_count_kv"), said("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads] * len(windows)
    widths = widths if isinstance(widths, list) else [widths] * len(windows)
    of_kind = dict(zip(windows, heads, strict=False))
    # Where all tokens are seen, keys of some models are values too, and they have other numbers of heads
    keys = (i for i in range(len(windows)) if f"blk.{i}.attn_k.weight" in said.there)
    alone = any(f"blk.{i}.attn_v.weight" not in said.there for i in keys) or len(set(of_kind.values())) > 1
    narrow = said.get("embedding_length_per_layer_input", 0)
    ends = [said.token("eos")] if said.token("eos") is not None else []
    ends += said.named_tokens("<turn|>", "<|tool_response>")  # each ends a turn
    found = {
        **common,
        "model_type": "gemma4_text",
        "eos_token_id": ends or None,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "head_dim": said("attention.key_length_swa"),
        "global_head_dim": said("attention.key_length"),
        "num_key_value_heads": of_kind.get(True, heads[0]),
        "num_global_key_value_heads": of_kind.get(False) if alone else None,
        "attention_k_eq_v": alone,
        "num_kv_shared_layers": sharing,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": said("attention.sliding_window"),
        "final_logit_softcapping": said.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": narrow,
        "vocab_size_per_layer_input": said.there.get("per_layer_token_embd.weight", (0,))[0],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa", 10000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": said("rope.freq_base"),
                "partial_rotary_factor": said.turned_part(),
            },
        },
    }
    if said.get("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": said("expert_count"),
            "top_k_experts": said("expert_used_count"),
            "moe_intermediate_size": said("expert_feed_forward_length"),
        }
    return found
