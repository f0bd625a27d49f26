"""A draft head's files: tensor names of every dialect, turned into one form."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.checkpoint.source import Source
from specexport_runtime.errors import CheckpointError

CONFIG_NAME = "config.json"
MASK = "mask_hidden"
"""The hidden states, side by side, that a parallel head has in the place of the target's."""
EMBED_NORM = "embed_norm.weight"
"""What every MTP module has, and no other head."""
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class HeadFiles:
    """A head as it lies on disk."""

    name: str  # in reports; never a machine path
    # ``config.json``; of a module in the target's checkpoint, what it says of the language model
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of each tensor, by the name in our form
    stored: Mapping[str, tuple[Path, str]]  # file and name in it of each tensor

    def tensor(self, name: str) -> Any:
        """One tensor, as torch has it."""
        from safetensors import safe_open

        path, key = self.stored[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)


def open_head(source: Source) -> HeadFiles:
    """Open a head's configuration and safetensors; raises CheckpointError if one cannot be read."""
    try:
        values = json.loads((source.folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source.name}: {CONFIG_NAME} cannot be read ({error}).", "fetch the head again."
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source.name}: {CONFIG_NAME} is no JSON object.", "fetch the head again.")
    is_module = values.get("speculators_model_type") == "mtp"
    shapes, stored = read_names(source, _name_beside_module if is_module else _our_name)
    return HeadFiles(source.name, values, shapes, stored)


def read_names(
    source: Source, our_name: Callable[[str], str | None]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[Path, str]]]:
    """Shape of each tensor in a source's safetensors, and its file and name there, by our name.

    ``our_name`` gives None for a tensor that is not wanted. Raises CheckpointError if a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, tuple[Path, str]] = {}
    for path in (path for path in source.files if path.suffix == ".safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    name = our_name(key)
                    if name is not None:
                        shapes[name], stored[name] = tuple(file.get_slice(key).get_shape()), (path, key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source.name}: {path.name} cannot be read ({error}).", "fetch the head again: the file is damaged."
            ) from error
    return shapes, stored


def _our_name(key: str) -> str | None:
    """A tensor's name in our form: without a prefix for the model, the first layer among the layers."""
    for prefix in ("model.", "eagle_module.", "eagle.", "medusa_heads.", "medusa_head."):
        key = key.removeprefix(prefix)
    name = "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key
    return None if name in _IGNORED else name


_PLACES = (r"(?:.+\.)?mtp_layers\.0", r"(?:.+\.)?mtp\.layers\.0", r"(?:.+\.)?mtp")
_NAMES = {
    "enorm": "embed_norm", "pre_fc_norm_embedding": "embed_norm", "token_layernorm": "embed_norm",
    "hnorm": "feature_norm", "pre_fc_norm_hidden": "feature_norm", "hidden_layernorm": "feature_norm",
    "eh_proj": "fc", "input_proj": "fc", "fc": "fc",
    "shared_head.norm": "norm", "final_layernorm": "norm", "norm": "norm",
    "shared_head.head": "lm_head", "embed_tokens": "embed_tokens",
    "pre_mlp_layernorm": "layers.0.post_attention_layernorm",
}  # fmt: skip


def name_in_module(key: str, num_layers: int | None = None) -> str | None:
    """Our name of a tensor of the first MTP module; None for a tensor that is not of it.

    DeepSeek and GLM store the module as one decoder layer more than there are, Qwen3-Next and EXAONE as ``mtp``, MiMo
    and speculators as ``mtp_layers.0`` or ``mtp.layers.0``. ``num_layers`` counts the decoder layers of the target's
    checkpoint that holds the module; None for a module in a separate file.
    """
    places = _PLACES if num_layers is None else (*_PLACES, rf"(?:model\.|language_model\.)*layers\.{num_layers}")
    for place in places:
        if found := re.fullmatch(place + r"\.(?P<rest>.+)", key):
            stem, _, kind = found["rest"].rpartition(".")
            if stem in _NAMES:
                return f"{_NAMES[stem]}.{kind}"
            # Below `mtp` itself, what is left is a layer behind the first.
            return None if stem.startswith("layers.") else f"layers.0.{found['rest']}"
    return None


def _name_beside_module(key: str) -> str | None:
    """Our name of a tensor in a folder of speculators that holds an MTP module, and tables beside it."""
    name = name_in_module(key)
    return name if name is not None or "layers" in key else _our_name(key)


def stored_name(name: str) -> str:
    """The name that speculators has for a tensor of an MTP module in our form."""
    stem, _, kind = name.rpartition(".")
    if stem == "lm_head":
        return name
    return f"mtp_layers.0.{_OF_SPECULATORS.get(stem, stem.removeprefix('layers.0.'))}.{kind}"


_OF_SPECULATORS = {
    "embed_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "fc": "input_proj", "norm": "final_layernorm",
}  # fmt: skip
