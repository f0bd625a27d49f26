"""What a GGUF file says of its model, where transformers' conversion leaves it out and takes its own defaults."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.checkpoint.gguf_layouts import LAYOUTS
from specexport.checkpoint.gguf_mapped import has_tensor_mapping
from specexport.checkpoint.gguf_reader import architecture, read
from specexport.checkpoint.source import Source
from specexport_runtime.errors import CheckpointError

_GIVE_ORIGINAL = "give the Hugging Face checkpoint that the file was made from."
_STATED = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_PARTIAL = {"phi3", "stablelm", "nemotron"}  # they may turn a part of each head only
_ROOTED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # Gemma's 27B models, by their layers
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLOSE = 1e-3  # stored factors are float32
_WIDTHS = {
    "up_exps.weight": ("moe_intermediate_size", "intermediate_size"),
    "up_shexp.weight": ("shared_expert_intermediate_size",),
}
"""What the rows of a tensor count, by its name after ``ffn_``: the first of these that a configuration has."""


def correct_config(source: Source, reader: Any, config: Any) -> Any:
    """Set in ``config`` what the file states and transformers did not take over; CheckpointError for odd scalings."""
    if reader is None:
        return config
    arch = architecture(reader)
    if arch == "llama" and read(reader, "llama.expert_count"):
        config = _mixtral(reader, config)
    text = config.get_text_config()
    if has_tensor_mapping(arch):  # transformers looks into the first part of a split file
        text.tie_word_embeddings = all(tensor.name != "output.weight" for tensor in reader.tensors)
    if arch in LAYOUTS:  # said whole there, but for scaled positions
        if LAYOUTS[arch].scales:
            _set_rope(source, reader, arch, text)
        return config
    _set_experts(reader, text)
    for key, name in (_STATED | ({"attention.key_length": "head_dim"} if arch == "gpt-oss" else {})).items():
        value = read(reader, f"{arch}.{key}")
        if value and hasattr(text, name):
            setattr(text, name, value)
    if arch in _ROOTED_BY_WIDTH:
        by_width = text.num_hidden_layers == _ROOTED_BY_WIDTH[arch]
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if by_width else text.head_dim
    pattern = read(reader, f"{arch}.attention.sliding_window_pattern")
    if pattern is not None and hasattr(text, "layer_types"):
        _set_layer_types(text, pattern)
    _set_rope(source, reader, arch, text)
    return config


def _mixtral(reader: Any, config: Any) -> Any:
    """The configuration of a Llama with experts, which is named like one without."""
    from transformers import MixtralConfig

    plain = config.to_dict()
    settings = {name: plain[name] for name in MixtralConfig().to_dict() if name in plain}
    return MixtralConfig(
        **{name: value for name, value in settings.items() if name not in ("model_type", "architectures")},
        num_local_experts=int(read(reader, "llama.expert_count")),
        num_experts_per_tok=int(read(reader, "llama.expert_used_count")),
    )


def _set_experts(reader: Any, text: Any) -> None:
    """How wide experts are, by the tensors themselves: files state it by several keys, and some do not."""
    widths = {
        tensor.name.partition(".ffn_")[2]: int(tensor.shape[1])
        for tensor in reader.tensors
        if ".ffn_" in tensor.name and len(tensor.shape) > 1
    }
    for tensor, names in _WIDTHS.items():
        name = next((name for name in names if hasattr(text, name)), None)
        if name is not None and tensor in widths:
            setattr(text, name, widths[tensor])


def _set_layer_types(text: Any, pattern: int | list[bool]) -> None:
    """Every so many layers one sees everything, or each layer is listed (true: a window)."""
    layers = range(text.num_hidden_layers)
    windows = pattern if isinstance(pattern, list) else [pattern != 0 and (i + 1) % pattern != 0 for i in layers]
    text.layer_types = ["sliding_attention" if windows[i] else "full_attention" for i in layers]


def _set_rope(source: Source, reader: Any, arch: str, text: Any) -> None:
    scaling = _scaling(source, reader, arch, text)
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        if scaling:
            raise _refuse(source, f"{scaling['rope_type']} scaling, and its model has no rotary positions")
        return
    own = parameters.get("full_attention", parameters)
    base, base_in_windows = read(reader, f"{arch}.rope.freq_base"), read(reader, f"{arch}.rope.freq_base_swa")
    if base:
        own["rope_theta"] = float(base)
    if base_in_windows and "sliding_attention" in parameters:
        parameters["sliding_attention"]["rope_theta"] = float(base_in_windows)
    turned = read(reader, f"{arch}.rope.dimension_count")
    if arch in _PARTIAL and turned:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        own["partial_rotary_factor"] = turned / head_dim
    own.update(scaling)


def _scaling(source: Source, reader: Any, arch: str, text: Any) -> dict[str, Any]:
    """Rope parameters beside the base; empty if positions are not scaled."""
    kind = read(reader, f"{arch}.rope.scaling.type")
    factor = read(reader, f"{arch}.rope.scaling.factor")
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(source, np.asarray(tensors["rope_freqs.weight"].data, np.float64), reader, arch)
    if tensors or kind == "longrope":
        raise _refuse(source, "longrope")
    if kind is None:
        factor = read(reader, f"{arch}.rope.scale_linear")  # as old files say it
        kind = "linear" if factor else "none"
    if kind == "none" or factor in (None, 0, 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise _refuse(source, kind)
    before = read(reader, f"{arch}.rope.scaling.original_context_length")
    found = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(before or text.max_position_embeddings),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = read(reader, f"{arch}.rope.scaling.{key}")
        if value is not None:
            found[name] = float(value)
    stretch = read(reader, f"{arch}.rope.scaling.attn_factor")
    if stretch is not None:  # the file's is a factor on yarn's own
        found["attention_factor"] = float(stretch) * (0.1 * math.log(float(factor)) + 1)
    return found


def _llama3_scaling(source: Source, factors: npt.NDArray[np.float64], reader: Any, arch: str) -> dict[str, Any]:
    """Llama 3.1's parameters from ``factors`` [head_dim / 2], which divide the frequencies."""
    if np.abs(factors - 1).max() <= _CLOSE:
        return {}
    base = float(read(reader, f"{arch}.rope.freq_base") or 10000.0)
    lengths = 2 * math.pi * base ** (np.arange(len(factors)) / len(factors))  # of the waves, in tokens
    smooth = (_LLAMA3["original_max_position_embeddings"] / lengths - _LLAMA3["low_freq_factor"]) / (
        _LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"]
    )
    smooth = smooth.clip(0, 1)
    largest = float(factors.max())
    expected = 1 / ((1 - smooth) / largest + smooth)
    if np.abs(expected - factors).max() > _CLOSE * largest:
        raise _refuse(source, "factors of its own (rope_freqs.weight)")
    return {"rope_type": "llama3", "factor": round(largest, 4), **_LLAMA3}


def _refuse(source: Source, kind: str) -> CheckpointError:
    return CheckpointError(f"{source.name} scales its positions by {kind}, which cannot be read.", _GIVE_ORIGINAL)
