"""MTP modules in a target's own checkpoint: where they are, and by which names. Imports no torch.

A checkpoint may hold several modules, one for each further token (``mtp_modules``).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from specexport.checkpoint.source import PACKED_PARTS, Source
from specexport.heads.files import CONFIG_NAME, MORE, HeadFiles, our_name, read_tensor_index
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

EMBED_NORM = "embed_norm.weight"
"""What every MTP module has, and no other head."""
_PLACES = (r"(?:.+\.)?mtp_layers\.(?P<at>\d+)", r"(?:.+\.)?mtp\.layers\.(?P<at>\d+)", r"(?:.+\.)?mtp")
_DECODER = r"(?:model\.|language_model\.)*layers\.(?P<at>\d+)"
_NUMBER = re.compile(r"(?:layers|more)\.(\d+)\.")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_NAMES = {
    "enorm": "embed_norm", "pre_fc_norm_embedding": "embed_norm", "token_layernorm": "embed_norm",
    "hnorm": "feature_norm", "pre_fc_norm_hidden": "feature_norm", "hidden_layernorm": "feature_norm",
    "eh_proj": "fc", "input_proj": "fc", "fc": "fc",
    "shared_head.norm": "norm", "final_layernorm": "norm", "norm": "norm",
    "shared_head.head": "lm_head", "embed_tokens": "embed_tokens",
    "pre_mlp_layernorm": "layers.0.post_attention_layernorm",
}  # fmt: skip


def name_in_module(key: str, num_layers: int | None = None) -> str | None:
    """Our name of a tensor of an MTP module; None for a tensor that is of none.

    Module i, from 0, has the layer ``layers.i``, and ``more.i`` beside it; the first has no such prefix.
    DeepSeek and GLM store the module as one decoder layer more than there are, Qwen3-Next and EXAONE as ``mtp``, MiMo
    and speculators as ``mtp_layers.0`` or ``mtp.layers.0``. ``num_layers`` counts the decoder layers of the target's
    checkpoint that holds the module; None for a module in a separate file.
    """
    for place in _PLACES if num_layers is None else (*_PLACES, _DECODER):
        if found := re.fullmatch(place + r"\.(?P<rest>.+)", key):
            number = int(found.groupdict().get("at") or 0) - (num_layers or 0 if place is _DECODER else 0)
            return None if number < 0 else _module_tensor_name(number, found["rest"])
    return None


def _module_tensor_name(number: int, rest: str) -> str:
    stem, _, kind = rest.rpartition(".")
    name = f"{_NAMES[stem]}.{kind}" if stem in _NAMES else f"layers.0.{rest}"
    if name.startswith("layers.0."):
        return f"layers.{number}.{name.removeprefix('layers.0.')}"
    return f"{MORE}{number}.{name}" if number else name


def name_beside_module(key: str) -> str | None:
    """Our name of a tensor in a folder of speculators that holds an MTP module, and tables beside it."""
    name = name_in_module(key)
    if name is None:
        return None if "layers" in key else our_name(key)
    found = _NUMBER.match(name)
    return None if found and found[1] != "0" else name


def stored_name(name: str) -> str:
    """The name that speculators has for a tensor of an MTP module in our form."""
    stem, _, kind = name.rpartition(".")
    if stem == "lm_head":
        return name
    return f"mtp_layers.0.{_OF_SPECULATORS.get(stem, stem.removeprefix('layers.0.'))}.{kind}"


_OF_SPECULATORS = {
    "embed_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "fc": "input_proj", "norm": "final_layernorm",
}  # fmt: skip


def open_mtp(source: Source, values: Mapping[str, Any]) -> HeadFiles:
    """Find the MTP module of a target's checkpoint; ``values`` configures its language model."""
    if source.gguf_file is not None:
        from specexport.heads.mtp_gguf import open_gguf_module

        return open_gguf_module(source, values)
    layers = int(values.get("num_hidden_layers") or len(values.get("layers_block_type") or ()))
    shapes, stored = read_tensor_index(source, lambda key: name_in_module(key, layers))
    if EMBED_NORM not in shapes and not any(name.startswith(MORE) for name in shapes):
        raise CheckpointError(
            f"{source.name} holds no MTP module.", "leave `--head mtp` out, or give the folder of a head."
        )
    packed = [key for _, key in stored.values() if key.rpartition(".")[2] in {*PACKED_PARTS, "weight_scale_inv"}]
    if packed:
        raise UnsupportedModelError(
            f"{source.name}: the weights of its MTP module are quantized ({min(packed)}), which are not read.",
            "give the checkpoint that it was quantized from.",
        )
    if any(name.startswith("layers.0.mixer.") for name in shapes):
        raise UnsupportedModelError(
            f"{source.name}: its MTP module has attention and experts in blocks of their own, as Nemotron-H has them, "
            "and only modules of one decoder layer are read.",
            "draft with `lookup`.",
        )
    files = HeadFiles(source.name, values, shapes, stored)
    _check_modules(files)
    return files


def num_modules(files: HeadFiles) -> int:
    """How many modules the tensors are of."""
    return 1 + max((int(found[1]) for name in files.shapes if (found := _NUMBER.match(name))), default=0)


def _check_modules(files: HeadFiles) -> None:
    """Refuse layers that share what is around them, and another count of modules than the configuration's."""
    count = num_modules(files)
    around = {int(name.split(".")[1]) for name in files.shapes if name.startswith(MORE)}
    around |= {0} if EMBED_NORM in files.shapes else set()
    absent = sorted(set(range(count)) - around)
    if absent and around == {0}:
        raise UnsupportedModelError(
            f"{files.name}: its MTP module has {count} layers, and only modules of one decoder layer are read.",
            "draft with `lookup`.",
        )
    if absent:
        raise CheckpointError(
            f"{files.name} holds {len(around)} of {count} MTP modules: number {absent[0] + 1} lacks its tensors.",
            "give the complete checkpoint.",
        )
    key = next((key for key in _COUNTS if type(files.values.get(key)) is int and files.values[key] > 0), None)
    if key is not None and files.values[key] != count:
        raise CheckpointError(
            f"{files.name} holds {count} MTP modules, and its configuration counts {files.values[key]} ({key}).",
            "give a checkpoint whose config.json belongs to its weights.",
        )


def holds_module(source: Source) -> bool:
    """Whether a checkpoint holds an MTP module that can be read; damaged files hold none."""
    if source.gguf_file is not None:
        from specexport.heads.mtp_gguf import holds_gguf_module

        return holds_gguf_module(source)
    try:
        values = json.loads((source.folder / CONFIG_NAME).read_text(encoding="utf-8"))
        open_mtp(source, values.get("text_config") or values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, CheckpointError, UnsupportedModelError):
        return False
    return True
