"""Whether a checkpoint's configuration fits its weights, and states its layers and its token ids properly.

A model would silently do without biases and layers that its configuration leaves out.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from specexport.checkpoint.gguf_mapped import convert
from specexport.checkpoint.gguf_rows import Conversion
from specexport.checkpoint.source import Source, read_object
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_LISTS = ("layer_types", "layers_block_type")
_COUNT = "num_hidden_layers"
_MORE_LAYERS = ("num_nextn_predict_layers",)
"""Layers after the last one that guess tokens: their weights are numbered as if they were the model's."""
_NUMBERED = re.compile(r"(.*\blayers|.*\bh|.*\bblocks)\.(\d+)\.")
_FIX = "give the config.json that belongs to the weights."

_BIAS = ".bias"
_GGUF_BIAS = re.compile(r"blk\.\d+\.(attn|ffn)_(q|k|v|qkv|output|up|gate|down)\.bias")

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ENDS, _BEGINS = "eos_token_id", "bos_token_id"


def check_layer_lists(source: Source) -> None:
    """Refuse a ``config.json`` whose list of layers has another length: transformers would leave out layers."""
    config = read_object(source, _CONFIG, missing_ok=True)
    text = config.get("text_config", config)
    count = text.get(_COUNT) if isinstance(text, dict) else None
    for name in _LISTS if type(count) is int else ():
        kinds = text.get(name)
        if isinstance(kinds, list) and len(kinds) != count:
            raise CheckpointError(
                f"{source.name}: config.json counts its layers in two ways: {_COUNT} is {count}, and the length "
                f"of {name} is {len(kinds)}.",
                _FIX,
            )


def check_no_layer_left(source: Source, model: Any, left: Iterable[str]) -> None:
    """Refuse a model with fewer layers than its weights have; ``left`` names weights that it has no place for."""
    config = model.config.get_text_config()
    counts: dict[str, int] = {}
    for name, _ in model.named_parameters():
        if found := _NUMBERED.match(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    more = sum(getattr(config, name, 0) or 0 for name in _MORE_LAYERS)
    for name in sorted(left):
        found = _NUMBERED.match(name)
        if found and found[1] in counts and int(found[2]) >= counts[found[1]] + more:
            raise CheckpointError(
                f"{source.name}: config.json describes {counts[found[1]]} layers, and the weights have more, for "
                f"example {name}.",
                _FIX,
            )


def unknown_layer_kind_error(config: Any, error: Exception) -> UnsupportedModelError | None:
    """The error for a model that failed because it has no layers of a kind that its configuration names."""
    kind = error.args[0] if isinstance(error, KeyError) and error.args else None
    if kind is None or kind not in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return None
    return UnsupportedModelError(
        f"{config.model_type} cannot be exported: its configuration names a layer of kind {kind!r}, and this "
        "architecture has none.",
        "check layer_types in config.json.",
    )


def check_no_bias_left(source: Source, model: Any, left: Iterable[str]) -> None:
    """Refuse a model without the biases that its weights in safetensors have; ``left`` names those left over."""
    modules = dict(model.named_modules())
    names = {name for name in left if name.endswith(_BIAS) and modules.get(name.removesuffix(_BIAS)) is not None}
    if not names:
        return
    from safetensors import safe_open

    for path in source.files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in sorted(names & set(file.keys())):
                    if bool(file.get_tensor(name).any()):
                        raise _refuse(source, name)


def check_no_gguf_bias_left(source: Source, reader: Any, model: Any, conversion: Conversion | None) -> None:
    """As :func:`check_no_bias_left`, of a GGUF file."""
    biases = [tensor for tensor in reader.tensors if _GGUF_BIAS.fullmatch(tensor.name) and tensor.data.any()]
    if not biases:
        return
    names = (conversion or convert(reader, model)).names
    for tensor in biases:
        if tensor.name not in names:
            raise _refuse(source, tensor.name)


def _refuse(source: Source, name: str) -> CheckpointError:
    return CheckpointError(
        f"{source.name} has a bias that its configuration leaves out, {name}.",
        "give the configuration that belongs to the weights, as with attention_bias or mlp_bias true.",
    )


def check_stated_ids(source: Source) -> None:
    """Refuse a folder whose configuration files hold no JSON object, or state what is no token id for BOS or EOS."""
    if source.gguf_file is not None:
        return
    for name in (_CONFIG, _GENERATION):
        found = read_object(source, name, missing_ok=True)
        places = {"": found, "text_config.": found.get("text_config")}
        for prefix, place in places.items():
            if isinstance(place, Mapping):
                _check_token_id(source, name, prefix + _ENDS, place.get(_ENDS), several=True)
                _check_token_id(source, name, prefix + _BEGINS, place.get(_BEGINS), several=False)
        if name == _GENERATION and found:
            _check_settings(source, found)


def _check_token_id(source: Source, name: str, key: str, value: Any, *, several: bool) -> None:
    if value is None:
        return
    for each in value if several and isinstance(value, list) else [value]:
        if isinstance(each, int) and not isinstance(each, bool) and (each >= 0 or not several):
            continue
        raise CheckpointError(
            f"{source.name}: {key} in {name} is {json.dumps(value)[:80]}, which is no token id"
            + (", nor a list of them." if several else "."),
            "write whole numbers from 0 on, as in the model that it was made from, or remove the key.",
        )


def _check_settings(source: Source, found: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(found))
    except Exception as error:  # a value of another type than transformers computes with
        raise CheckpointError(
            f"{source.name}: {_GENERATION} cannot be used ({type(error).__name__}: {str(error)[:200]}).",
            f"put it right, or remove it and give {_ENDS} in {_CONFIG}.",
        ) from error
