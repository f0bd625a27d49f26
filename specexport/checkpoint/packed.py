"""Checkpoints of GPTQ, AWQ and compressed-tensors: read from safetensors, without the libraries that made them.

Packed weights must lie around zero, as those of trained models do. A zero that is read one step off moves every weight
of a layer by one step, and a comparison with floats of the same reading does not show it.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.packed_blocks import awq_weight, compressed_weight, gptq_weight
from specexport.checkpoint.source import PACKED_PARTS, Source
from specexport.checkpoint.stored import WEIGHT_PREFIX
from specexport.checkpoint.tagged import SMALLEST_RANK, Tags
from specexport.passes.block_weight import BlockWeight, add_zero_offsets, join
from specexport_runtime.bundle.quant_kinds import either
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_FORMATS = {
    "pack-quantized",
    "int-quantized",
}  # of compressed-tensors; others hold floats of 8 and 4 bits, or are sparse


_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)")
_EXPERT_PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
"""What transformers makes of an expert's layer: the parameter that stacks it, and whether it comes first or second."""
_RENAMED_BLOCK = ("block_sparse_moe", "mlp")

_ROWS = 256  # of a layer, from all over it
_OFF = (0.75, 1.5)
"""Steps from zero where another reading, one step away, is the better one. Uniform codes lie half a step off."""
_SURE = 4.0  # standard errors


class PackedCheckpoint(NamedTuple):
    """What a checkpoint with packed weights holds."""

    floats: Mapping[str, Tensor]  # its other tensors, by name
    weights: Mapping[str, BlockWeight]  # the packed ones, by layer

    def all_floats(self) -> dict[str, Tensor]:
        """All weights as floats, by name."""
        made = {f"{layer}.weight": torch.from_numpy(weight.floats()) for layer, weight in self.weights.items()}
        return {**self.floats, **made}

    def tagged(self, tags: Tags) -> dict[str, Tensor]:
        """Tags for the matrices, and the vectors."""
        made = dict(self.floats)
        for name, tensor in self.floats.items():
            if tensor.dim() >= SMALLEST_RANK and tensor.is_floating_point():
                made[name] = tags.make(tuple(tensor.shape), partial(_plain_rows, tensor, tags.dtype))
        for layer, weight in self.weights.items():
            made[f"{layer}.weight"] = tags.make(weight.shape, partial(_block_rows, weight, tags.dtype))
        return made


def _plain_rows(tensor: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return tensor[start:stop].to(dtype, copy=True)


def _block_rows(weight: BlockWeight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return torch.from_numpy(weight.floats(np.arange(start, stop))).to(dtype)


def read_packed(source: Source, settings: Mapping[str, Any]) -> PackedCheckpoint:
    """A checkpoint's tensors, packed ones as they are stored; CheckpointError for a form that is not known."""
    from safetensors import SafetensorError, safe_open

    method = str(settings["quant_method"])
    layout = str(settings.get("format", ""))
    if method == "compressed-tensors" and layout not in _FORMATS:
        raise CheckpointError(
            f"{source.name} holds compressed-tensors of format {layout!r}; {', '.join(sorted(_FORMATS))} are known.",
            "give the checkpoint that it was quantized from.",
        )
    if (settings.get("transform_config") or {}).get("config_groups") or (
        (settings.get("sparsity_config") or {}).get("format", "dense") != "dense"
    ):
        raise CheckpointError(
            f"{source.name} holds rotated or sparse weights, which only its own library reads.",
            "give the checkpoint that it was quantized from.",
        )
    state: dict[str, torch.Tensor] = {}
    packed: dict[str, dict[str, np.ndarray]] = {}
    place = _index(source)
    for path in source.files:
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source.name}: {path.name} cannot be read ({error}).", "fetch or convert the checkpoint again."
            ) from error
        for name, tensor in tensors.items():
            layer, _, part = name.rpartition(".")
            if place.get(name, path.name) != path.name:  # a file that the index does not take it from
                continue
            if part in PACKED_PARTS or tensor.dtype == torch.int8:
                packed.setdefault(layer, {})[part] = _numpy(tensor)
            else:
                state[name] = tensor
    weights = {}
    for layer, tensors in packed.items():
        weights[layer] = _make_weight(method, tensors, _layer_settings(source, settings, layer), layer)
    check_centre(source, weights, settings)
    return PackedCheckpoint(state, weights)


def _layer_settings(source: Source, settings: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The settings of one layer: GPTQModel's ``dynamic`` gives some by expressions; the first that fits counts."""
    for key, own in (settings.get("dynamic") or {}).items():
        sign, expression = (key[:2], key[2:]) if key[:2] in ("+:", "-:") else ("+:", key)
        try:
            fits = re.match(expression, layer)
        except re.error as error:
            raise CheckpointError(
                f"{source.name}: dynamic in quantization_config has {key!r}, which is no expression ({error}).",
                "give the config.json that was written with the weights.",
            ) from error
        if not fits:
            continue
        if sign == "-:" or not isinstance(own, Mapping):
            raise CheckpointError(
                f"{source.name}: dynamic in quantization_config says by {key!r} that {layer} is not quantized; it is.",
                "give the config.json that was written with the weights.",
            )
        return {**settings, **own}
    return settings


def _index(source: Source) -> Mapping[str, str]:
    """The file of each tensor by the checkpoint's index; empty if it has none."""
    path = source.folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    try:
        found: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source.name}: {path.name} cannot be read ({error}).", f"fetch {path.name} again."
        ) from error
    if missing := sorted(set(found.values()) - {file.name for file in source.files}):
        raise CheckpointError(f"{source.name}: {missing[0]} is missing.", "give the complete checkpoint.")
    return found


def name_packed(weights: Mapping[str, BlockWeight], model: Any, name: str) -> dict[str, BlockWeight]:
    """PackedCheckpoint weights by their names in a traced graph, stacked experts one below the other."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found, left = {}, dict(weights)
    for stacked, layers in _stacked_experts(weights).items():
        parameter, whole = parameters.get(stacked), _stack_weights([weights[layer] for layer in layers])
        if parameter is None or parameter.dim() != 3 or whole is None:
            continue
        if getattr(model.get_submodule(stacked.rpartition(".")[0]), "is_transposed", False):
            continue
        if (parameter.shape[0] * parameter.shape[1], parameter.shape[2]) == whole.shape:
            found[f"{WEIGHT_PREFIX}{stacked}"] = whole
            left = {layer: weight for layer, weight in left.items() if layer not in layers}
    for layer, weight in left.items():
        parameter = parameters.get(f"{layer}.weight")
        if parameter is None or tuple(parameter.shape) != weight.shape:
            raise UnsupportedModelError(
                f"{layer} of {name} cannot be kept as it is stored: transformers makes another weight of it.",
                f"say how to quantize it anew: --quantize {either()}, or none for float weights.",
            )
        found[f"{WEIGHT_PREFIX}{layer}.weight"] = weight
    return found


def _stacked_experts(weights: Mapping[str, BlockWeight]) -> dict[str, list[str]]:
    """Layers of experts in the order in which transformers stacks them, by the parameter that it makes of them."""
    places: dict[str, dict[tuple[int, int], str]] = {}
    for layer in weights:
        match = _EXPERT.fullmatch(layer)
        if match is not None and match["part"] in _EXPERT_PARTS:
            parameter, half = _EXPERT_PARTS[match["part"]]
            block = match["block"].replace(*_RENAMED_BLOCK)
            places.setdefault(f"{block}.experts.{parameter}", {})[int(match["expert"]), half] = layer
    return {name: [layers[place] for place in sorted(layers)] for name, layers in places.items()}


def _stack_weights(weights: list[BlockWeight]) -> BlockWeight | None:
    """All of them as one; None if they are of several forms."""
    if any(weight.form.has_offsets for weight in weights):
        weights = [add_zero_offsets(weight) for weight in weights]
    return join(weights) if len({(weight.form, weight.shape[1]) for weight in weights}) == 1 else None


def _make_weight(
    method: str, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any], layer: str
) -> BlockWeight:
    try:
        if method == "gptq":
            return gptq_weight(tensors, settings, layer)
        if method == "awq":
            return awq_weight(tensors, settings, layer)
        _check_zeros(tensors, settings)
        return compressed_weight(tensors, layer)
    except KeyError as error:
        raise CheckpointError(
            f"{layer} has no {error.args[0]} beside its other tensors.", "fetch or convert the checkpoint again."
        ) from error
    except (ValueError, IndexError) as error:  # tensors of other shapes than the format has, or of batched experts
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise CheckpointError(
            f"{layer} is no {method} matrix ({shapes}).", "give the checkpoint that it was quantized from."
        ) from error


def _check_zeros(tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
    """Refuse weights that all groups of the configuration say have zero points, and that have none."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    if groups and "weight_zero_point" not in tensors and all(group.get("symmetric") is False for group in groups):
        raise KeyError("weight_zero_point")


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def check_centre(source: Source, weights: Mapping[str, BlockWeight], settings: Mapping[str, Any]) -> None:
    """Refuse weights (by layer) about one step off zero: the median over the layers of their mean, in steps."""
    found = [_estimate_mean(weight) for weight in weights.values()]
    if not found:
        return
    means, errors = (np.array(values) for values in zip(*found, strict=True))
    centre = float(np.median(means))
    spread = 1.4826 * float(np.median(np.abs(means - centre)))
    error = 1.2533 * max(spread, float(np.median(errors))) / len(found) ** 0.5
    if not max(_OFF[0], _SURE * error) < abs(centre) < _OFF[1]:
        return
    hint = "give the checkpoint that it was quantized from."
    if settings["quant_method"] == "gptq":
        other = "gptq" if settings.get("checkpoint_format", "gptq") == "gptq_v2" else "gptq_v2"
        hint = f"set checkpoint_format in quantization_config to {other} if it was made so, or {hint}"
    raise CheckpointError(
        f"{source.name}: its packed weights lie {centre:+.2f} steps beside zero on average, as where zeros are read "
        "otherwise than they were stored.",
        hint,
    )


def _estimate_mean(weight: BlockWeight) -> tuple[float, float]:
    """Mean of a weight in steps of its blocks, and its standard error."""
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, min(_ROWS, weight.shape[0])).astype(np.int64))
    blocks = weight.read(rows)
    steps = blocks.codes.astype(np.float32).reshape(*blocks.scales.shape, -1) - (1 << (weight.form.bits - 1))
    if blocks.offsets is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            steps += np.nan_to_num(blocks.offsets / blocks.scales, posinf=0.0, neginf=0.0)[..., None]
    return float(steps.mean()), float(steps.std()) / steps.size**0.5
