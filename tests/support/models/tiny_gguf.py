"""Tiny GGUF files, float or quantized, shared by the tests of the compiler."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.passes.block_weight import BlockWeight
from tests.support.models.tiny_models import GROUPED, make_model

WHOLE = {
    "self_attn.sinks": "attn_sinks.weight", "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
"""Tensors of a layer whose names end in no kind: what a file calls them."""
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16 scales of a stored block are: the other bytes may be anything."""
MIDDLES = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""What a format's second scale is times the first: values then lie around zero."""
LEVELS = {"Q2_K": 2 * 15, "Q3_K": 3 * 32, "Q4_K": 8 * 63, "Q5_K": 16 * 63, "Q6_K": 32 * 127, "IQ4_XS": 100 * 32}

_WIDE = GROUPED | {"hidden_size": 256, "intermediate_size": 256}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_INSIDE = _MOE | {"moe_intermediate_size": 256}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2moe": ("Qwen2Moe", _WIDE | _INSIDE | {"shared_expert_intermediate_size": 512}),
    "qwen3moe": ("Qwen3Moe", _WIDE | _INSIDE | {"head_dim": 32, "norm_topk_prob": True}),
    "llama": ("Mixtral", _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 3}),
    "olmoe": ("Olmoe", _WIDE | _MOE),
    "gpt-oss": ("GptOss", _WIDE | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": (
        "MiniMaxM2",
        _WIDE | {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""Models with experts by GGUF's name of their architecture: as in ``ARCHITECTURES``."""
MIXED_EXPERTS = {"ffn_down_exps.weight": "Q6_K", "_exps.weight": "Q4_K", "": "Q8_0"}


def random_blocks(kind: str, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """uint8 [N, bytes]: a weight of any integers, most values below 0.2."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    stored = generator.integers(0, 256, (shape[0] * shape[1] // block, num_bytes), dtype=np.uint8)
    most = LEVELS.get(kind, {"Q8_0": 127, "IQ4_NL": 127}.get(kind, 8 if kind.startswith("Q4") else 16))
    scales = generator.uniform(0.05, 0.2, (len(stored), 1)) / most
    if kind == "MXFP4":
        stored[:, 0] = generator.integers(119, 123, len(stored))  # a power of two
    for at, factor in zip(HALVES.get(kind, ()), (1.0, MIDDLES.get(kind, 0.0)), strict=False):
        stored[:, at : at + 2] = (scales * factor).astype(np.float16).view(np.uint8)
    return stored.reshape(shape[0], -1)


def write_gguf(
    model: Any, path: Path, *, architecture: str = "qwen2", kinds: Mapping[str, str] | None = None, seed: int = 0,
    stated: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray] | None = None, split: int = 0,
    one_row: bool = False,
) -> None:  # fmt: skip
    """Write a model with a byte vocabulary; weights of ``kinds`` (the first ending that fits) are random, in both.

    ``stated``: settings by their whole keys, None drops one. ``split``: tensors of a part. ``one_row``: gates of shared
    experts are matrices.
    """
    import torch

    config, generator = model.config, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer, config.vocab_size)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for short, weight in _tensors(model, name, parameter, architecture):
            shape = parameter.shape if weight.ndim > parameter.ndim or (one_row and "shexp" in short) else weight.shape
            found = [kind for ending, kind in (kinds or {}).items() if short.endswith(ending) and weight.ndim > 1]
            if found and not short.endswith((".bias", "inp.weight")):
                kind = gguf.GGMLQuantizationType[found[0]]
                rows = random_blocks(found[0], (weight.numel() // weight.shape[-1], weight.shape[-1]), generator)
                weight.copy_(torch.from_numpy(gguf.dequantize(rows, kind)).view(weight.shape))
                writer.add_tensor(short, rows.reshape(*shape[:-1], -1), raw_dtype=kind)
            else:
                writer.add_tensor(short, np.ascontiguousarray(weight.numpy()).reshape(shape))
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    for key, value in (stated or {}).items():
        writer.kv_data[0].pop(key, None)  # the writer refuses a key twice
        if value is not None:
            setting_of(writer, value)(key, value)
    finish(writer)


def add_vocabulary(writer: gguf.GGUFWriter, size: int, named: Mapping[int, str] = {}) -> None:
    """Bytes, one merge, and tokens that stand for nothing; others may be ``named`` by their ids."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"][:size]
    tokens += [f"<extra{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([named.get(i, token) for i, token in enumerate(tokens)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def setting_of(writer: gguf.GGUFWriter, value: Any) -> Any:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    return getattr(writer, f"add_{kinds[type(value)]}")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def _names(architecture: str) -> gguf.TensorNameMap:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture], 16)


def name_of(architecture: str, name: str) -> str:
    """What a file calls a tensor of a model of transformers; a name of a layer that gguf does not know stays."""
    found = _names(architecture).get_name(name, (".weight", ".bias"))
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        found = f"blk.{layer}.{WHOLE[rest]}" if rest in WHOLE else found or f"blk.{layer}.{rest}"
    return found or name


def _tensors(model: Any, name: str, weight: Any, architecture: str) -> list[tuple[str, Any]]:
    """What a file has of a weight: names, and views of it."""
    layer, _, part = name.partition(".mlp.experts.")
    if part:
        experts = model.get_submodule(f"{layer}.mlp.experts")
        kind = "bias" if part.endswith("_bias") else "weight"
        whole = weight.transpose(1, 2) if experts.is_transposed and kind == "weight" else weight
        halves = whole.chunk(2, dim=1) if experts.is_concatenated else (whole[:, ::2], whole[:, 1::2])
        parts = {"down": whole} if "down_proj" in part else dict(zip(("gate", "up"), halves, strict=True))
        return [(name_of(architecture, f"{layer}.ffn_{way}_exps.{kind}"), each) for way, each in parts.items()]
    if name.endswith("mlp.shared_expert_gate.weight"):
        weight = weight[0]
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # turned in pairs, not in halves
        dim = model.config.hidden_size // model.config.num_attention_heads
        weight = weight.view(-1, 2, dim // 2, *weight.shape[1:]).transpose(1, 2)
    return [(name_of(architecture, name), weight)]


def write_experts(path: Path, architecture: str, kinds: dict[str, str], *, one_row: bool = False, **stated: Any) -> Any:
    """Write a file; gives the model that it is of."""
    prefix, config = EXPERTS[architecture]
    model = make_model(prefix, config)
    keys = {"expert_count": 4, "expert_used_count": model.config.num_experts_per_tok}
    if "head_dim" in config:
        keys |= {"attention.key_length": 32, "attention.value_length": 32}
    if architecture == "gpt-oss":
        keys |= {"attention.sliding_window": model.config.sliding_window}
    if architecture == "minimax-m2":
        keys |= {"rope.dimension_count": 16, "expert_gating_func": 2}
    stated = {f"{architecture}.{key}": value for key, value in keys.items()} | stated
    write_gguf(model, path, architecture=architecture, kinds=kinds, stated=stated, one_row=one_row)
    return model


DEPTH, WIDTH = 512, 24


def make_weight(kind: str, width: int = WIDTH, seed: int = 7) -> tuple[BlockWeight, np.ndarray]:
    stored = random_blocks(kind, (width, DEPTH), np.random.default_rng(seed))
    found = FORMATS[kind]
    weight = BlockWeight(
        kind, found.form, (width, DEPTH), stored.nbytes, lambda rows: found.read(stored[rows]), found.spread
    )
    return weight, gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
