"""MTP modules in a target's own checkpoint: where they are, and by which names.

A checkpoint may hold several modules, one for each further token. The first is taken, and run again for all of them.
"""

import json
from collections.abc import Mapping
from typing import Any

from specexport.checkpoint.source import PACKED_PARTS, Source
from specexport.heads.files import CONFIG_NAME, EMBED_NORM, HeadFiles, name_in_module, read_names
from specexport_runtime.errors import CheckpointError, UnsupportedModelError


def open_mtp(source: Source, values: Mapping[str, Any]) -> HeadFiles:
    """Find the MTP module of a target's checkpoint; ``values`` configures its language model.

    Raises CheckpointError if it has none, and UnsupportedModelError if its layer is not one of attention and MLP, or
    its weights are quantized.
    """
    if source.gguf_file is not None:
        raise CheckpointError(
            f"{source.name}: MTP modules are read from safetensors only.",
            "give the Hugging Face checkpoint that the file was made from.",
        )
    layers = int(values.get("num_hidden_layers") or len(values.get("layers_block_type") or ()))
    shapes, stored = read_names(source, lambda key: name_in_module(key, layers))
    if EMBED_NORM not in shapes:
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
    return HeadFiles(source.name, values, shapes, stored)


def holds_module(source: Source) -> bool:
    """Whether a checkpoint holds an MTP module that can be read; damaged files hold none."""
    if source.gguf_file is not None:
        return False
    try:
        values = json.loads((source.folder / CONFIG_NAME).read_text(encoding="utf-8"))
        open_mtp(source, values.get("text_config") or values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, CheckpointError, UnsupportedModelError):
        return False
    return True


def module_config(files: HeadFiles, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of the module's one layer: the target's own, with the kind of layer that its tensors have."""
    sparse = any(".experts." in name for name in files.shapes)
    config = {key: value for key, value in layer.items() if value is not None}
    config["num_hidden_layers"] = 1
    choices: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if sparse else [0],
    }
    return config | {key: value for key, value in choices.items() if key in config}


def conventions_of(files: HeadFiles) -> dict[str, bool]:
    """What writers of these names mean, as far as it is known; a checkpoint says nothing of it."""
    stored = {key.rpartition(".")[0].rpartition(".")[2] for _, key in files.stored.values()}
    by_speculators = "speculators_model_type" in files.values
    return {
        "norm_output": not stored & {"enorm"},
        "feature_first": "token_layernorm" in stored and not by_speculators,
    }
