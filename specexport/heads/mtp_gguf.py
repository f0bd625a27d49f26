"""MTP modules in GGUF files: the last blocks of the target's own file, or a file of their own (``mtp-*.gguf``).

``block_count`` counts modules too, ``nextn_predict_layers`` says how many of the blocks are modules. Each is a decoder
layer of the target's kind, with ``nextn`` tensors beside it. So the blocks are read as layers of a deeper target.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.checkpoint.gguf_mapped import convert
from specexport.checkpoint.gguf_reader import architecture, list_mtp_blocks, open_reader, read
from specexport.checkpoint.gguf_rows import Conversion
from specexport.checkpoint.source import Source
from specexport.checkpoint.stored import StoredWeight
from specexport.checkpoint.tagged import gguf_weights
from specexport.heads.files import MORE, OTHER_TARGET, HeadFiles
from specexport_runtime.errors import CheckpointError, UnsupportedModelError


class _ModuleArchitecture(NamedTuple):
    """What is known of the modules of an architecture (llama.cpp, which runs them; ``docs/heads.md`` lists them)."""

    targets: tuple[str, ...]  # transformers' names of the target's kind
    norm_output: bool = True  # what the next step reads is normed
    several: bool = False  # files hold several, which draft in turn


_KINDS = {
    "qwen35": _ModuleArchitecture(("qwen3_5_text",)),
    "qwen35moe": _ModuleArchitecture(("qwen3_5_moe_text",)),
    "qwen3next": _ModuleArchitecture(("qwen3_next",)),
    "glm4moe": _ModuleArchitecture(("glm4_moe",)),
    "deepseek2": _ModuleArchitecture(("deepseek_v3", "glm4_moe_lite")),
    "mimo2": _ModuleArchitecture(("mimo_v2_flash",), norm_output=False, several=True),
}
_FORM = "give the Hugging Face checkpoint that the file was made from."
_NAMES = {"enorm": "embed_norm", "hnorm": "feature_norm", "eh_proj": "fc"}
_OPTIONAL = {"shared_head_norm": "norm", "embed_tokens": "embed_tokens", "shared_head_head": "lm_head"}


@dataclass(frozen=True)
class GgufModule(HeadFiles):
    """The modules of a GGUF file, by the names of a checkpoint."""

    weights: Mapping[str, StoredWeight | Tensor]

    def tensor(self, name: str) -> Any:
        """One tensor, as float32 in torch."""
        found = self.weights[name]
        return found.whole() if isinstance(found, StoredWeight) else found


def open_gguf_module(source: Source, values: Mapping[str, Any]) -> HeadFiles:
    """Find the MTP module of a GGUF file for a target that ``values`` configures."""
    reader = open_reader(source)
    blocks, arch = _find_module_blocks(source, reader), architecture(reader)
    kind = _KINDS.get(arch)
    if kind is None:
        raise UnsupportedModelError(
            f"{source.name}: MTP modules in GGUF files of {arch} are not read.",
            f"{_FORM[:-1]}, or draft with `lookup`.",
        )
    if len(blocks) > 1 and not kind.several:
        raise UnsupportedModelError(
            f"{source.name} holds {len(blocks)} MTP modules, and files of {arch} are read with one.", _FORM
        )
    layers = int(values["num_hidden_layers"])
    if values.get("model_type") not in kind.targets or blocks.start != layers:
        raise CheckpointError(
            f"{source.name} holds an MTP module of a {arch} of {blocks.start} layers, and the target is a "
            f"{values.get('model_type')} of {layers}.",
            OTHER_TARGET,
        )
    own = copy(reader)
    own.tensors = [tensor for tensor in reader.tensors if tensor.name.startswith(tuple(f"blk.{i}." for i in blocks))]
    model = _extend_target(source, values, reader, blocks)
    conversion = convert(own, model)
    found = gguf_weights(source, own, conversion, torch.float32)
    if found is None:
        raise UnsupportedModelError(f"{source.name}: the layer of its MTP module is stored in an unknown way.", _FORM)
    weights: dict[str, StoredWeight | Tensor] = {}
    for number, block in enumerate(blocks):
        place = f"model.layers.{block}."
        lacking = [name for name in model.state_dict() if name.startswith(place) and name not in found]
        if lacking:
            raise CheckpointError(
                f"{source.name}: block {block}, its MTP module, lacks {len(lacking)} tensors, for example that of "
                f"{lacking[0].removeprefix(place)}.",
                "fetch or convert the file again.",
            )
        own_names = ((name.removeprefix(place), weight) for name, weight in found.items() if name.startswith(place))
        weights |= {f"layers.{number}.{name}": weight for name, weight in own_names}
        beside = f"{MORE}{number}." if number else ""
        weights |= {
            beside + name: value for name, value in _read_module_tensors(source, reader, conversion, block).items()
        }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    stated = {"hidden_size": int(read(reader, f"{arch}.embedding_length") or 0), **_read_vocab_size(reader)}
    said = {**values, **stated, "norm_output": kind.norm_output}
    return GgufModule(source.name, said, shapes, {}, weights)


def holds_gguf_module(source: Source) -> bool:
    """Whether a GGUF file holds a module that can be read; damaged files hold none."""
    try:
        reader = open_reader(source)
        found, kind = len(_find_module_blocks(source, reader)), _KINDS.get(architecture(reader))
        return kind is not None and (found == 1 or kind.several)
    except CheckpointError:
        return False


def _find_module_blocks(source: Source, reader: Any) -> range:
    """The blocks of modules; CheckpointError if there are none."""
    blocks, there = list_mtp_blocks(reader), {tensor.name for tensor in reader.tensors}
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


def _extend_target(source: Source, values: Mapping[str, Any], reader: Any, blocks: range) -> Any:
    """The target with a layer more for each block of a module, of the kind of its tensors, without data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    there = {tensor.name for tensor in reader.tensors}
    more: dict[str, Any] = {"num_hidden_layers": blocks.stop}
    for key, sign, kinds in _LISTS:
        if isinstance(values.get(key), list):
            mine = [kinds[f"blk.{block}.{sign}.weight" in there] for block in blocks]
            more[key] = [*values[key][: blocks.start], *mine]
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**values, **more}))
    except Exception as error:  # sizes that do not fit one another
        raise CheckpointError(
            f"{source.name}: no layer of {architecture(reader)} can be made ({type(error).__name__}: {error}).",
            "fetch or convert the file again.",
        ) from error


_LISTS = (
    ("layer_types", "attn_sinks", ("full_attention", "sliding_attention")),
    ("mlp_layer_types", "ffn_gate_inp", ("dense", "sparse")),
)
"""Lists of the kinds of layers, and the tensor by which a layer is of the second."""


def _read_module_tensors(source: Source, reader: Any, conversion: Conversion, block: int) -> dict[str, Tensor]:
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


def _read_vocab_size(reader: Any) -> dict[str, int]:
    """How many tokens a file's embedding has; nothing where it has none."""
    rows = [int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    return {"vocab_size": rows[0]} if rows else {}
