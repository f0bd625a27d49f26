"""MTP modules in GGUF files: the last blocks of the target's own file, or a file of their own (``mtp-*.gguf``).

``block_count`` counts modules too, ``nextn_predict_layers`` says how many of the blocks are modules. Each is a decoder
layer of the target's kind, with ``nextn`` tensors beside it. So its block is read as a layer of a deeper target.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specexport.checkpoint.gguf_mapped import convert
from specexport.checkpoint.gguf_reader import architecture, module_blocks, open_reader, read
from specexport.checkpoint.gguf_rows import Conversion
from specexport.checkpoint.source import Source
from specexport.checkpoint.stored import StoredWeight
from specexport.checkpoint.tagged import gguf_weights
from specexport.heads.files import OTHER_TARGET, HeadFiles
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

MODEL_TYPES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
"""Architectures whose modules are read, and transformers' name of the target's kind; ``docs/heads.md`` lists them."""
_FORM = "give the Hugging Face checkpoint that the file was made from."
_NAMES = {"enorm": "embed_norm", "hnorm": "feature_norm", "eh_proj": "fc"}
_OPTIONAL = {"shared_head_norm": "norm", "embed_tokens": "embed_tokens", "shared_head_head": "lm_head"}
_ALL_VALUES = {"norm_output": True}
"""What the next step reads is normed (llama.cpp)."""


@dataclass(frozen=True)
class GgufModule(HeadFiles):
    """The modules of a GGUF file, by the names of a checkpoint."""

    weights: Mapping[str, StoredWeight | Tensor]

    def tensor(self, name: str) -> Any:
        """One tensor, as float32 in torch."""
        found = self.weights[name]
        return found.whole() if isinstance(found, StoredWeight) else found


def open_gguf_module(source: Source, values: Mapping[str, Any]) -> HeadFiles:
    """Find the MTP module of a GGUF file for a target that ``values`` configures.

    Raises CheckpointError if it has none, or that of another target, and UnsupportedModelError for an architecture
    whose modules are not read.
    """
    reader = open_reader(source)
    blocks = _find(source, reader)
    arch = architecture(reader)
    if arch not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{source.name}: MTP modules in GGUF files of {arch} are not read.",
            f"{_FORM[:-1]}, or draft with `lookup`.",
        )
    if len(blocks) > 1:
        raise UnsupportedModelError(
            f"{source.name} holds {len(blocks)} MTP modules, and files of {arch} are read with one.", _FORM
        )
    layers = int(values["num_hidden_layers"])
    if values.get("model_type") != MODEL_TYPES[arch] or blocks.start != layers:
        raise CheckpointError(
            f"{source.name} holds an MTP module of a {arch} of {blocks.start} layers, and the target is a "
            f"{values.get('model_type')} of {layers}.",
            OTHER_TARGET,
        )
    own = copy(reader)
    own.tensors = [tensor for tensor in reader.tensors if tensor.name.startswith(f"blk.{blocks.start}.")]
    model = _deeper(source, values, reader, layers)
    conversion = convert(own, model)
    found = gguf_weights(source, own, conversion, torch.float32)
    if found is None:
        raise UnsupportedModelError(f"{source.name}: the layer of its MTP module is stored in an unknown way.", _FORM)
    place = f"model.layers.{layers}."
    weights = {f"layers.0.{name.removeprefix(place)}": weight for name, weight in found.items()}
    lacking = [name for name in model.state_dict() if name.startswith(place) and name not in found]
    if lacking:
        raise CheckpointError(
            f"{source.name}: block {layers}, its MTP module, lacks {len(lacking)} tensors, for example that of "
            f"{lacking[0].removeprefix(place)}.",
            "fetch or convert the file again.",
        )
    weights |= _beside(source, reader, conversion, layers)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    stated = {"hidden_size": int(read(reader, f"{arch}.embedding_length") or 0), **_vocabulary(reader)}
    return GgufModule(source.name, {**values, **stated, **_ALL_VALUES}, shapes, {}, weights)


def holds_gguf_module(source: Source) -> bool:
    """Whether a GGUF file holds a module that can be read; damaged files hold none."""
    try:
        reader = open_reader(source)
        return len(_find(source, reader)) == 1 and architecture(reader) in MODEL_TYPES
    except CheckpointError:
        return False


def _find(source: Source, reader: Any) -> range:
    """The blocks of modules; CheckpointError if there are none."""
    blocks, there = module_blocks(reader), {tensor.name for tensor in reader.tensors}
    if not blocks:
        raise CheckpointError(
            f"{source.name} holds no MTP module ({architecture(reader)}.nextn_predict_layers is not there, or 0).",
            "leave `--head mtp` out, or give the file or folder of a head.",
        )
    wanted = f"blk.{blocks.start}.nextn.eh_proj.weight"
    if wanted not in there:
        raise CheckpointError(
            f"{source.name} counts {len(blocks)} MTP modules, and holds none ({wanted} is not there).",
            "give the file that holds it, `--head mtp-NAME.gguf`, or leave `--head` out.",
        )
    return blocks


def _deeper(source: Source, values: Mapping[str, Any], reader: Any, layers: int) -> Any:
    """The target with one layer more, without data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    more: dict[str, Any] = {"num_hidden_layers": layers + 1}
    if isinstance(values.get("layer_types"), list):
        more["layer_types"] = [*values["layer_types"][:layers], "full_attention"]
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**values, **more}))
    except Exception as error:  # sizes that do not fit one another
        raise CheckpointError(
            f"{source.name}: no layer of {architecture(reader)} can be made ({type(error).__name__}: {error}).",
            "fetch or convert the file again.",
        ) from error


def _beside(source: Source, reader: Any, conversion: Conversion, block: int) -> dict[str, Tensor]:
    """The tensors around a module's layer; what it shares with its target is left out."""
    from gguf import dequantize

    there, found = {tensor.name: tensor for tensor in reader.tensors}, {}
    for short, name in (_NAMES | _OPTIONAL).items():
        key = f"blk.{block}.nextn.{short}.weight"
        if short == "shared_head_norm" and key not in there:
            key = "output_norm.weight"
        tensor = there.get(key)
        if tensor is None:
            if name in _OPTIONAL.values() and name != "norm":
                continue
            raise CheckpointError(f"{source.name}: its MTP module lacks {key}.", "fetch or convert the file again.")
        if name.endswith("norm"):  # stored as those of the layer are
            found[f"{name}.weight"] = conversion.norm(tensor, block)
        else:
            values = dequantize(tensor.data, tensor.tensor_type)
            found[f"{name}.weight"] = torch.from_numpy(values.astype("float32"))
    return found


def _vocabulary(reader: Any) -> dict[str, int]:
    """How many tokens a file's embedding has; nothing where it has none."""
    rows = [int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    return {"vocab_size": rows[0]} if rows else {}
