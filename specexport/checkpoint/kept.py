"""Which weights of a quantized checkpoint can stay as they are stored, by their names in a traced graph."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.checkpoint.gguf_mapped import convert
from specexport.checkpoint.gguf_rows import Conversion, RowReader, tensor_shape
from specexport.checkpoint.source import Source
from specexport.checkpoint.stored import WEIGHT_PREFIX, Stored, StoredWeight, WatchedFile
from specexport.passes.block_weight import BlockWeight, join
from specexport_runtime.bundle.quant_kinds import either
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_SAMPLES = 16  # rows of each weight that are compared with the model's
_ROUNDING = 1e-6  # of the largest value: an offset is added in float32
_HOW_TO_CONVERT = f"say how to quantize it anew: --quantize {either()}, or none for float weights."


def check_formats(source: Source, reader: Any) -> None:
    """Refuse (``CheckpointError``) a GGUF file with weights in a format that no engine multiplies as it is."""
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    strangers = [name for name in kinds if name not in _FLOATS | FORMATS.keys()]
    if strangers:
        raise CheckpointError(
            f"{source.name} holds {kinds[strangers[0]]} weights of format {strangers[0]}, and no engine multiplies "
            "these as they are.",
            _HOW_TO_CONVERT,
        )


def find_kept_weights(
    source: Source, reader: Any, model: Any, stored: Stored, conversion: Conversion | None = None
) -> dict[str, BlockWeight]:
    """Quantized weights by their names in a traced graph; UnsupportedModelError if they are not the model's."""
    quantized = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type.name in FORMATS}
    if not quantized:
        return {}
    conversion = conversion or convert(reader, model)
    watched = {path: WatchedFile(path, source.name) for path in source.files}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stacked = {part: name for name, stack in conversion.stacks.items() for part in stack.names}
    kept: dict[str, BlockWeight] = {}

    def keep(name: str, weight: BlockWeight | None, tensors: str, kind: str) -> None:
        if (
            weight is None
            or name not in parameters
            or not _matches_parameter(weight, parameters, stored, name, conversion)
        ):
            raise UnsupportedModelError(
                f"{tensors} of {source.name} ({kind}) cannot be kept as it is stored: "
                "transformers makes another weight of it.",
                _HOW_TO_CONVERT,
            )
        for alias, parameter in parameters.items():  # a tied LM head is traced under either name
            if parameter is parameters[name]:
                kept[WEIGHT_PREFIX + alias] = weight

    for tensor in quantized.values():
        name = stacked.get(tensor.name) or conversion.names.get(tensor.name)
        if name is None or WEIGHT_PREFIX + name in kept:  # no weight of this model: transformers leaves it out too
            continue
        if tensor.name in stacked:
            stack, shape = conversion.stacks[name], tensor_shape(tensor)
            whole = _join_tensors(source, [(part, quantized.get(part)) for part in stack.names], watched, reader)
            weight: BlockWeight | None = whole.take(stack.row_order(*shape[:2]))
        else:
            order, weight = conversion.row_order(tensor), _read_block_weight(tensor, watched[reader.paths[tensor.name]])
            in_place = order is not None and np.array_equal(order, np.arange(len(order)))
            weight = None if order is None else weight if in_place else weight.take(order)
        keep(name, weight, tensor.name, tensor.tensor_type.name)
    for name, joined in conversion.joined.items():  # what is made of floats stays one of floats
        if isinstance(joined.how, np.ndarray) and quantized.keys() & set(joined.names):
            whole = _join_tensors(source, [(part, quantized.get(part)) for part in joined.names], watched, reader)
            keep(name, whole.take(joined.how), " and ".join(joined.names), whole.kind)
    return kept


def _read_block_weight(tensor: Any, file: WatchedFile) -> BlockWeight:
    """A matrix of the file, or the matrices of all experts one below the other."""
    *counts, depth = tensor_shape(tensor)
    shape = math.prod(counts), depth
    found, read = FORMATS[tensor.tensor_type.name], RowReader(file, tensor, shape[0])
    return BlockWeight(
        tensor.tensor_type.name,
        found.form,
        shape,
        int(tensor.n_bytes),
        lambda rows: found.read(read(rows)),
        found.spread,
    )


def _join_tensors(
    source: Source, parts: list[tuple[str, Any]], watched: Mapping[Path, WatchedFile], reader: Any
) -> BlockWeight:
    """Tensors that an engine has one weight of, one below the other."""
    found = [
        None if tensor is None else _read_block_weight(tensor, watched[reader.paths[name]]) for name, tensor in parts
    ]
    whole = [weight for weight in found if weight is not None]
    if len(whole) < len(parts) or len({weight.form for weight in whole}) > 1:
        named = " and ".join(
            f"{name} ({'floats' if tensor is None else tensor.tensor_type.name})" for name, tensor in parts
        )
        raise UnsupportedModelError(
            f"{named} of {source.name} cannot be kept as they are stored: an engine has one format for both.",
            _HOW_TO_CONVERT,
        )
    return join(whole)


def _matches_parameter(
    weight: BlockWeight, parameters: Mapping[str, Any], stored: Stored, name: str, conversion: Conversion
) -> bool:
    """Whether some rows are those of the model's parameter; of experts, rows of the first and the last."""
    parameter, stack = parameters[name], conversion.stacks.get(name)
    if stack is None:
        if tuple(parameter.shape) != weight.shape:
            return False
        rows = np.unique(np.linspace(0, weight.shape[0] - 1, _SAMPLES).astype(np.int64))
        theirs = _rows_of(parameter, stored.get(name), rows.tolist())
    else:
        last, height = len(parameter) - 1, weight.shape[0] // len(parameter)
        both = _rows_of(parameter, stored.get(name), [0, last])
        both = both.transpose(1, 2) if stack.turned else both
        if (len(both[0]), both.shape[2]) != (height, weight.shape[1]):
            return False
        within = np.unique(np.linspace(0, height - 1, _SAMPLES // 2).astype(np.int64))
        rows = np.concatenate([within, within + last * height])
        theirs = both[:, within].flatten(0, 1)
    ours, right = weight.floats(rows), theirs.float().numpy()
    return bool(np.abs(ours - right).max() <= _ROUNDING * max(float(np.abs(right).max()), 1e-30))


def _rows_of(parameter: Any, stored: StoredWeight | None, rows: list[int]) -> Tensor:
    if stored is None:
        found: Tensor = parameter.detach()[rows]
        return found
    return torch.cat([stored.rows(row, row + 1) for row in rows])
