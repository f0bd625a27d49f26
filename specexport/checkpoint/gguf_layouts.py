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

from specexport.checkpoint.gguf_reader import architecture
from specexport.checkpoint.gguf_rows import Conversion, JoinedRows, Rows, find_stacks, tensor_shape
from specexport.checkpoint.gguf_settings import (
    GgufMetadata,
    read_deepseek_settings,
    read_gemma_settings,
    read_glm_settings,
    read_mimo_settings,
    read_qwen_next_settings,
)
from specexport_runtime.executors.base import Float32Array


class JoinedTensors(NamedTuple):
    """A module's weight that the file has in other tensors."""

    names: tuple[str, ...]  # of the file's tensors, within the block
    # What makes it of them as floats, or, for ``in_rows``, which of their rows it is, one tensor below the other: of
    # the model's configuration and the tensors' heights
    how: Callable[..., Any]
    in_rows: bool = True


class GgufLayout(NamedTuple):
    """How a file of an architecture has a model of transformers."""

    settings: Callable[[GgufMetadata], dict[str, Any]]  # of the model's kind
    names: Mapping[str, str]  # of modules of a layer, or of parameters, by what the file calls them within a block
    changes: Mapping[str, Callable[[Float32Array], Float32Array]] = {}  # by the file's name
    joined: Mapping[str, JoinedTensors] = {}  # by the module's name
    scales: bool = True  # positions may be scaled; if not, ``settings`` refuse that


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


def _join_latent_kv(keys: Float32Array, values: Float32Array) -> Float32Array:
    """Rows of keys and values of each head in turn, of keys [heads, rank, size] and values [heads, size, rank]."""
    return np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, values.shape[2])


def _compute_gated_delta_order(config: Any, mixed: int, gate: int) -> Rows:
    """Rows of query, key, value and gate of each key head in turn; the file has those of all heads, then the next."""
    heads, ends = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = np.split(np.arange(mixed + gate), [ends, 2 * ends, mixed])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).ravel()


def _select_qkv_rows(number: int, config: Any, height: int) -> Rows:
    """Rows of queries (0), keys (1) or values (2), which the file has one below the other."""
    queries = config.num_attention_heads * config.head_dim
    keys = (height - queries) * config.head_dim // (config.head_dim + config.v_head_dim)
    return np.split(np.arange(height), [queries, queries + keys])[number]


LAYOUTS = {
    "glm4moe": GgufLayout(read_glm_settings, _BLOCK),
    "deepseek2": GgufLayout(
        read_deepseek_settings,
        _BLOCK | _LATENT_NAMES,
        joined={"self_attn.kv_b_proj": JoinedTensors(("attn_k_b", "attn_v_b"), _join_latent_kv, in_rows=False)},
        scales=False,
    ),
    "qwen3next": GgufLayout(
        read_qwen_next_settings,
        _BLOCK | _GATED_DELTA,
        {**dict.fromkeys(_CENTRED, _less_one), "ssm_a": lambda values: np.log(-values)},
        {"linear_attn.in_proj_qkvz": JoinedTensors(("attn_qkv", "attn_gate"), _compute_gated_delta_order)},
    ),
    "gemma4": GgufLayout(read_gemma_settings, GEMMA_NAMES, scales=False),
    "mimo2": GgufLayout(
        read_mimo_settings,
        _BLOCK | {"attn_sinks.weight": "self_attn.sinks"},
        joined={
            f"self_attn.{name}_proj": JoinedTensors(("attn_qkv",), partial(_select_qkv_rows, number))
            for number, name in enumerate("qkv")
        },
    ),
}
"""By GGUF's name of the architecture."""


def read_layout_settings(reader: Any) -> dict[str, Any]:
    """The configuration of a file's target, but for scaled positions; raises as what it says demands."""
    return LAYOUTS[architecture(reader)].settings(GgufMetadata(reader))


def name_within(names: Mapping[str, str], rest: str) -> str | None:
    """The model's name, within its layer, of a tensor within a block; see ``GgufLayout.names``."""
    stem, _, ending = rest.rpartition(".")
    return names.get(rest) or (f"{names[stem]}.{ending}" if stem in names else None)


class LayoutConversion(Conversion):
    """As :class:`Conversion`, of an architecture in ``LAYOUTS``."""

    def __init__(self, reader: Any, model: Any) -> None:
        self._layout = LAYOUTS[architecture(reader)]
        own = model.state_dict()
        self._shapes = {name: tuple(value.shape) for name, value in own.items()}
        self.stacks = find_stacks(reader, model)
        shapes = {tensor.name: tensor_shape(tensor) for tensor in reader.tensors}
        found = {name: self._find_model_name(name) or "" for name in shapes}
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

    def _find_model_name(self, name: str) -> str | None:
        """The model's name of a tensor."""
        if name in _BESIDE:
            return _BESIDE[name]
        at = _BLOCKS.fullmatch(name)
        own = None if at is None else name_within(self._layout.names, at["rest"])
        return None if at is None or own is None else f"model.layers.{at['number']}.{own}"

    def _process_weight(self, values: np.ndarray, name: str) -> np.ndarray | None:
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
