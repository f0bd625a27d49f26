"""Which weights of a quantized checkpoint can stay as they are stored, by the names that a traced graph has for them.

Some rows of each weight are compared with those that the model has.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexport.frontend.gguf_blocks import FORMATS
from specexport.frontend.gguf_rows import Conversion, RowReader, tensor_shape
from specexport.frontend.source import Source
from specexport.frontend.stored import Stored, StoredWeight, WatchedFile
from specexport.frontend.trace import WEIGHT_PREFIX
from specexport.passes.block_weight import BlockWeight
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_SAMPLES = 16  # rows of each weight that are compared with the model's
_ROUNDING = 1e-6  # of the largest value: an offset is added in float32
_HOW_TO_CONVERT = "say how to quantize it anew: --quantize int8 or int4, or none for float weights."


def check_formats(source: Source, reader: Any) -> None:
    """See that all weights of a GGUF file can be kept.

    Args:
        source: the file.
        reader: of it.

    Raises:
        CheckpointError: it has weights in a format that no engine multiplies as it is.
    """
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    strangers = [name for name in kinds if name not in _FLOATS | FORMATS.keys()]
    if strangers:
        raise CheckpointError(
            f"{source.name} holds {kinds[strangers[0]]} weights of format {strangers[0]}, and no engine multiplies "
            "these as they are.",
            _HOW_TO_CONVERT,
        )


def kept_weights(
    source: Source, reader: Any, model: Any, stored: Stored, conversion: Conversion | None = None
) -> dict[str, BlockWeight]:
    """The quantized weights of a checkpoint, by their names in a traced graph; empty if it has none.

    Args:
        source: where it is.
        reader: of its file.
        model: loaded from the same file by transformers.
        stored: weights that the model has no data of.
        conversion: of the file to the model, where it is known.

    Raises:
        UnsupportedModelError: they are not the loaded model's one for one.
    """
    quantized = [tensor for tensor in reader.tensors if tensor.tensor_type.name in FORMATS]
    if not quantized:
        return {}
    conversion = conversion or Conversion(reader, model)
    files = {path: WatchedFile(path, source.name) for path in source.files}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {}
    for tensor in quantized:
        name = conversion.names.get(tensor.name)
        if name is None and len(tensor.data.shape) == 2:  # no weight of this model: transformers leaves it out too
            continue
        weight = _kept(tensor, conversion, files[reader.paths[tensor.name]])
        if weight is None or name is None or name not in parameters or not _same(weight, parameters, stored, name):
            raise UnsupportedModelError(
                f"{tensor.name} of {source.name} ({tensor.tensor_type.name}) cannot be kept as it is stored: "
                "transformers makes another weight of it.",
                _HOW_TO_CONVERT,
            )
        for alias, parameter in parameters.items():  # a tied LM head is traced under either name
            if parameter is parameters[name]:
                kept[WEIGHT_PREFIX + alias] = weight
    return kept


def _kept(tensor: Any, conversion: Conversion, file: WatchedFile) -> BlockWeight | None:
    """A matrix of the file with its rows in the model's order; None if it is no matrix."""
    order = conversion.row_order(tensor)
    if order is None:
        return None
    found, read = FORMATS[tensor.tensor_type.name], RowReader(file, tensor)
    whole = BlockWeight(
        tensor.tensor_type.name,
        found.form,
        (tensor_shape(tensor)[0], tensor_shape(tensor)[1]),
        int(tensor.n_bytes),
        lambda rows: found.read(read(rows)),
        found.spread,
    )
    return whole if np.array_equal(order, np.arange(len(order))) else whole.take(order)


def _same(weight: BlockWeight, parameters: Mapping[str, Any], stored: Stored, name: str) -> bool:
    parameter = parameters[name]
    if tuple(parameter.shape) != weight.shape:
        return False
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, _SAMPLES).astype(np.int64))
    theirs = _rows_of(parameter, stored.get(name), rows.tolist()).float().numpy()
    ours = weight.floats(rows)
    return bool(np.abs(ours - theirs).max() <= _ROUNDING * max(float(np.abs(theirs).max()), 1e-30))


def _rows_of(parameter: Any, stored: StoredWeight | None, rows: list[int]) -> Tensor:
    if stored is None:
        found: Tensor = parameter.detach()[rows]
        return found
    return torch.cat([stored.rows(row, row + 1) for row in rows])
