"""Fitting a LoRA adapter to a model: which layer each tensor belongs to, and that none is left over."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.lora import WEIGHTS, LoraSource, damaged_adapter_error
from specexport.checkpoint.stored import WEIGHT_PREFIX, StoredWeight, WatchedFile
from specexport.passes.low_rank import LowRank
from specexport_runtime.bundle.quant_kinds import either
from specexport_runtime.errors import CheckpointError

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<table>[AB]))")


class LoraFactors(NamedTuple):
    """The two factors of one layer, read when they are asked for."""

    module: str  # of the base model
    kind: Literal["linear", "embedding"]  # an embedding is a table, whose rows are looked up
    rank: int  # r
    scale: float  # s
    turned: bool  # the layer's weight is stored as [K, N]
    shape: tuple[int, int]  # of the layer, [N, K]; of a table [H, V]
    file: WatchedFile
    names: tuple[str, str]  # of A [r, K] and B [N, r] in the file

    @property
    def parameter(self) -> str:
        """Name of the weight that they change."""
        return f"{self.module}.weight"

    def down(self) -> np.ndarray:
        """A, float32 [r, K]."""
        return self._read(self.names[0])

    def up(self) -> np.ndarray:
        """The scaled factor s B, float32 [N, r]."""
        return self._read(self.names[1]) * np.float32(self.scale)

    def delta(self, start: int, stop: int) -> np.ndarray:
        """What is added to rows ``start`` to ``stop`` of the weight as the model stores it, float32."""
        down, up = self._read(self.names[0]), self._read(self.names[1])
        part = down[:, start:stop].T @ up.T if self._rows_are_inputs else up[start:stop] @ down
        scaled: np.ndarray = part * np.float32(self.scale)
        return scaled

    @property
    def _rows_are_inputs(self) -> bool:
        return self.turned or self.kind == "embedding"

    def _read(self, name: str) -> np.ndarray:
        from safetensors import safe_open

        self.file.check()
        with safe_open(self.file.path, framework="pt") as file:
            array: np.ndarray = file.get_tensor(name).float().numpy()
        return array


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter that fits a model."""

    source: LoraSource
    factors: tuple[LoraFactors, ...]  # of each layer that it changes

    @property
    def rank(self) -> int:
        """The largest r."""
        return max(each.rank for each in self.factors)


def read_adapter(source: LoraSource, model: Any) -> LoraAdapter:
    """Fit an adapter to a model by names and shapes; CheckpointError names a tensor too many or too few."""
    where = source.where
    shapes, file = _tensor_shapes(source.folder / WEIGHTS, where), WatchedFile(source.folder / WEIGHTS, source.source)
    names: dict[str, dict[str, str]] = {}
    for name in shapes:
        match = _FACTOR.fullmatch(name)
        if match is None or not name.startswith(_PREFIX):
            raise _unknown_tensor_error(where, name)
        module = match["module"].removeprefix(_PREFIX)
        names.setdefault(module, {})[match["side"] or match["table"]] = name
    modules = dict(model.named_modules())
    targets = _targets(source.config, model, modules)
    factors = []
    for module, sides in names.items():
        if module not in modules:
            raise _misfit_error(where, next(iter(sides.values())), f"the model has no module {module}")
        if module not in targets:
            raise damaged_adapter_error(
                where, f"{next(iter(sides.values()))} is of a module that its configuration does not name"
            )
        if sides.keys() != {"A", "B"}:
            raise damaged_adapter_error(where, f"{module} has {' and '.join(sorted(sides))} only")
        pair = sides["A"], sides["B"]
        factors.append(_fit(where, source.config, model, module, pair, shapes, file))
    lacking = next((module for module in targets if module not in names), None)
    if lacking is not None:
        raise damaged_adapter_error(where, f"its configuration names {lacking}, and it has no tensors for it")
    if not factors:
        raise damaged_adapter_error(where, "it has no tensors")
    return LoraAdapter(source, tuple(factors))


def _tensor_shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())  # it is no dictionary
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise damaged_adapter_error(where, f"{WEIGHTS} cannot be read ({error})") from error


def _fit(
    where: str,
    config: Mapping[str, Any],
    model: Any,
    module: str,
    names: tuple[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    file: WatchedFile,
) -> LoraFactors:
    """The factors of one module, their sizes compared with it."""
    layer = model.get_submodule(module)
    is_table = isinstance(layer, torch.nn.Embedding)
    if ("lora_embedding_" in names[0]) != is_table:
        raise _misfit_error(where, names[0], f"{module} is a {type(layer).__name__}")
    sizes = tuple(layer.weight.shape)
    turned = isinstance(layer, Conv1D)  # stored [K, N]: the layer decides, as in PEFT, not ``fan_in_fan_out``
    width, depth = sizes[::-1] if turned or is_table else sizes
    rank = int(_match_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_match_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    for name, shape in ((names[0], (rank, depth)), (names[1], (width, rank))):
        if shapes[name] != shape:
            raise _misfit_error(where, name, f"it is {list(shapes[name])}, and {module} takes {list(shape)}")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied and layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        raise CheckpointError(
            f"{where} changes {module}, and the model has one matrix for its embedding and its LM head.",
            "train it without that module, or untie the two in the checkpoint.",
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraFactors(module, "embedding" if is_table else "linear", rank, scale, turned, (width, depth), file, names)


def _targets(config: Mapping[str, Any], model: Any, modules: Mapping[str, Any]) -> set[str]:
    """The layers that a configuration names, as PEFT finds them."""
    linear, wanted = (torch.nn.Linear, Conv1D), config["target_modules"]
    if wanted == "all-linear":
        head = model.get_output_embeddings()
        found = {name for name, layer in modules.items() if isinstance(layer, linear) and layer is not head}
    else:
        kinds = (*linear, torch.nn.Embedding)
        found = {name for name, layer in modules.items() if isinstance(layer, kinds) and _matches_module(wanted, name)}
    excluded = config.get("exclude_modules")
    numbers, pattern = config.get("layers_to_transform"), config.get("layers_pattern") or None
    return {
        name
        for name in found
        if not (excluded and _matches_module(excluded, name))
        and (numbers is None or isinstance(wanted, str) or _layer_number(name, pattern) in _as_list(numbers))
    }


def _matches_module(wanted: Any, module: str) -> bool:
    """Whether a pattern, or one of several names, means a module: the whole name, or the end of it."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _layer_number(module: str, pattern: Any) -> int | None:
    """Number of the layer that a module is in; None outside of all."""
    for each in _as_list(pattern if pattern is not None else r"[^.]*"):
        match = re.match(rf".*\.{each}\.(\d+)\.", module)
        if match is not None:
            return int(match[1])
    return None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _match_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _misfit_error(where: str, tensor: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} does not fit the target: {tensor}: {what}.",
        "give an adapter that was trained on this target, by the module names of this release of transformers.",
    )


def _unknown_tensor_error(where: str, name: str) -> CheckpointError:
    fix = "train it with LoRA factors alone, or merge it with PEFT (merge_and_unload) and build the merged checkpoint"
    return CheckpointError(f"{where} holds {name}, which is no factor of a LoRA layer.", f"{fix}.")


def merge_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> None:
    """Add an adapter to the weights, W + s B A in float32, rounded; CheckpointError for those kept as integers."""
    kept = next((each for each in adapter.factors if WEIGHT_PREFIX + each.parameter in checkpoint.kept), None)
    if kept is not None:
        raise CheckpointError(
            f"{adapter.source.where} cannot be merged into {kept.module}: its weights stay the integers of the "
            "quantized checkpoint.",
            f"say how to quantize the sum (--quantize {either('none')}), or let requests choose the adapter "
            "(--lora-mode choose).",
        )
    parameters = dict(checkpoint.model.named_parameters())
    for each in adapter.factors:
        if each.parameter not in checkpoint.stored:
            with torch.no_grad():
                weight = parameters[each.parameter]
                weight.copy_(_add_delta(weight, each, 0, len(weight)))
    checkpoint.stored = _stored_with_adapter(checkpoint, adapter)


@contextmanager
def use_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> Iterator[Checkpoint]:
    """Within the block, the float model that an adapter makes of a checkpoint, which is as it was afterwards."""
    parameters = dict(checkpoint.model.named_parameters())
    loaded = [each for each in adapter.factors if each.parameter not in checkpoint.stored]
    before = {each.parameter: parameters[each.parameter].detach().clone() for each in loaded}
    try:
        with torch.no_grad():
            for each in loaded:
                weight = parameters[each.parameter]
                weight.copy_(_add_delta(weight, each, 0, len(weight)))
        yield replace(checkpoint, stored=_stored_with_adapter(checkpoint, adapter))
    finally:
        with torch.no_grad():
            for name, weight in before.items():
                parameters[name].copy_(weight)


def low_ranks(adapter: LoraAdapter) -> dict[str, LowRank]:
    """An adapter's products by the name of the weight beside each; CheckpointError for an embedding."""
    table = next((each for each in adapter.factors if each.kind == "embedding"), None)
    if table is not None:
        raise CheckpointError(
            f"{adapter.source.where} changes the embedding {table.module}, and requests cannot choose that.",
            "build a bundle with this adapter alone, or train it without that module.",
        )
    return {
        WEIGHT_PREFIX + each.parameter: LowRank(each.rank, each.shape, each.down, each.up) for each in adapter.factors
    }


def _stored_with_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> dict[str, StoredWeight]:
    """The stored weights, those of the adapter's layers with what it adds."""
    changed = {
        each.parameter: _merge_stored(checkpoint.stored[each.parameter], each)
        for each in adapter.factors
        if each.parameter in checkpoint.stored
    }
    return {**checkpoint.stored, **changed}


def _merge_stored(stored: StoredWeight, factors: LoraFactors) -> StoredWeight:
    def rows(start: int, stop: int) -> Tensor:
        return _add_delta(stored.rows(start, stop), factors, start, stop)

    return replace(stored, rows=rows)


def _add_delta(weight: Tensor, factors: LoraFactors, start: int, stop: int) -> Tensor:
    return (weight.float() + torch.from_numpy(factors.delta(start, stop))).to(weight.dtype)
