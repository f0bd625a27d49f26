"""GGUF files of architectures that transformers has models of, and no way from file to model: names and settings.

They are those of GLM-4.5 and its successors, DeepSeek-V3 and what is made like it, Qwen3-Next, and MiMo-V2, targets
whose files hold MTP modules; and those of Gemma 4, whose assistants are files of their own.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.gguf_reader import architecture, read
from specexport.checkpoint.gguf_rows import Conversion, JoinedRows, Rows, find_stacks, tensor_shape
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from specexport_runtime.executors.base import Float32Array

_ENDLESS = 1e20
_SIGMOID = 2
"""What ``expert_gating_func`` says of routers that score each expert by itself."""


class Joined(NamedTuple):
    """A module's weight that the file has in other tensors."""

    names: tuple[str, ...]  # of the file's tensors, within the block
    # What makes it of them as floats, or, for ``in_rows``, which of their rows it is, one tensor below the other: of
    # the model's configuration and the tensors' heights
    how: Callable[..., Any]
    in_rows: bool = True


class Layout(NamedTuple):
    """How a file of an architecture has a model of transformers."""

    settings: Callable[["Said"], dict[str, Any]]  # of the model's kind
    names: Mapping[str, str]  # of modules of a layer, or of parameters, by what the file calls them within a block
    changes: Mapping[str, Callable[[Float32Array], Float32Array]] = {}  # by the file's name
    joined: Mapping[str, Joined] = {}  # by the module's name


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


def _glm(said: Said) -> dict[str, Any]:
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


def _deepseek(said: Said) -> dict[str, Any]:
    if said.get("rope.scaling.type", "none") != "none":
        raise said.refuse(f"rope.scaling.type {said('rope.scaling.type')}")
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


def _qwen_next(said: Said) -> dict[str, Any]:
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


def _mimo(said: Said) -> dict[str, Any]:
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
    """Settings of Gemma 4's layers, of a target and of an assistant."""
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
    found = {
        **common,
        "model_type": "gemma4_text",
        "eos_token_id": [common["eos_token_id"], *said.named_tokens("<turn|>", "<|tool_response>")],  # all end a turn
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


_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
_LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_GATED_DELTA = {
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
GEMMA_NAMES = {
    **{key: name for key, name in _BLOCK.items() if name.startswith("self_attn.")},
    "attn_norm": "input_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2", "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
}  # fmt: skip
_CENTRED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")


def _less_one(values: Float32Array) -> Float32Array:
    return values - np.float32(1)


def _latent(keys: Float32Array, values: Float32Array) -> Float32Array:
    """Rows of keys and values of each head in turn, of keys [heads, rank, size] and values [heads, size, rank]."""
    return np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, values.shape[2])


def _delta(config: Any, mixed: int, gate: int) -> Rows:
    """Rows of query, key, value and gate of each key head in turn; the file has those of all heads, then the next."""
    heads, ends = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = np.split(np.arange(mixed + gate), [ends, 2 * ends, mixed])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).ravel()


def _third(number: int, config: Any, height: int) -> Rows:
    """Rows of queries (0), keys (1) or values (2), which the file has one below the other."""
    queries = config.num_attention_heads * config.head_dim
    keys = (height - queries) * config.head_dim // (config.head_dim + config.v_head_dim)
    return np.split(np.arange(height), [queries, queries + keys])[number]


LAYOUTS = {
    "glm4moe": Layout(_glm, _BLOCK),
    "deepseek2": Layout(
        _deepseek,
        _BLOCK | _LATENT_NAMES,
        joined={"self_attn.kv_b_proj": Joined(("attn_k_b", "attn_v_b"), _latent, in_rows=False)},
    ),
    "qwen3next": Layout(
        _qwen_next,
        _BLOCK | _GATED_DELTA,
        {**dict.fromkeys(_CENTRED, _less_one), "ssm_a": lambda values: np.log(-values)},
        {"linear_attn.in_proj_qkvz": Joined(("attn_qkv", "attn_gate"), _delta)},
    ),
    "gemma4": Layout(gemma, GEMMA_NAMES),
    "mimo2": Layout(
        _mimo,
        _BLOCK | {"attn_sinks.weight": "self_attn.sinks"},
        joined={
            f"self_attn.{name}_proj": Joined(("attn_qkv",), partial(_third, number))
            for number, name in enumerate("qkv")
        },
    ),
}
"""By GGUF's name of the architecture."""


def settings_of(reader: Any) -> dict[str, Any]:
    """The configuration of a file's target, without scaled positions; raises as what it says demands."""
    said = Said(reader)
    tied = "output.weight" not in said.there
    return LAYOUTS[architecture(reader)].settings(said) | {"tie_word_embeddings": tied}


class LaidConversion(Conversion):
    """As :class:`Conversion`, of an architecture in ``LAYOUTS``."""

    def __init__(self, reader: Any, model: Any) -> None:
        self._layout = LAYOUTS[architecture(reader)]
        own = model.state_dict()
        self._shapes = {name: tuple(value.shape) for name, value in own.items()}
        self.stacks = find_stacks(reader, model)
        shapes = {tensor.name: tensor_shape(tensor) for tensor in reader.tensors}
        found = {name: self._theirs(name) or "" for name in shapes}
        self.names = {name: theirs for name, theirs in found.items() if theirs in own}
        self.joined = {}
        config, there = model.config.get_text_config(), set(self.names.values())
        for name in own.keys() - there:
            if (at := _LAYER.fullmatch(name)) and (how := self._layout.joined.get(at["module"])):
                names = tuple(f"blk.{at['number']}.{each}.weight" for each in how.names)
                if shapes.keys() >= set(names):
                    heights = (shapes[each][0] for each in names)
                    rows = how.how(config, *heights) if how.in_rows else how.how
                    self.joined[name] = JoinedRows(self._shapes[name], names, rows)

    def _theirs(self, name: str) -> str | None:
        """The model's name of a tensor."""
        if name in _BESIDE:
            return _BESIDE[name]
        at = _BLOCKS.fullmatch(name)
        if at is None:
            return None
        place, (stem, _, ending) = f"model.layers.{at['number']}.", at["rest"].rpartition(".")
        whole, module = self._layout.names.get(at["rest"]), self._layout.names.get(stem)
        return place + whole if whole else f"{place}{module}.{ending}" if module else None

    def _processed(self, values: np.ndarray, name: str) -> np.ndarray | None:
        short = name.removesuffix(".weight").rpartition(".")[2]
        change = self._layout.changes.get(short)
        return values if change is None else change(values)

    def vector(self, tensor: Any) -> Tensor | None:
        """See ``Conversion.vector``."""
        found = super().vector(tensor)
        return None if found is None else found.view(self._shapes[self.names[tensor.name]])

    def small(self, tensor: Any) -> Tensor | None:
        """See ``Conversion.small``: convolutions."""
        from gguf import dequantize

        shape = self._shapes[self.names[tensor.name]]
        if len(shape) == len(tensor_shape(tensor)):
            return None
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32)).view(shape)


_BESIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_BLOCKS = re.compile(r"blk\.(?P<number>\d+)\.(?P<rest>.+)")
_LAYER = re.compile(r"model\.layers\.(?P<number>\d+)\.(?P<module>.+)\.weight")
