"""Which weights of a quantized checkpoint can stay as they are stored, by the names that a traced graph has for them.

What transformers does to a GGUF file's weights (other names; rows of queries and keys in another order) is asked of its
own conversion, and then held to the loaded model: some rows of each weight must be those that the model has.
"""

from collections import Counter
from typing import Any

import numpy as np

from specexport.frontend.gguf_blocks import FORMATS, Bytes
from specexport.frontend.source import Source
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


def kept_weights(source: Source, reader: Any, model: Any) -> dict[str, BlockWeight]:
    """The quantized weights of a checkpoint, by their names in a traced graph; empty if it has none.

    Args:
        source: where it is.
        reader: of its file.
        model: loaded from the same file by transformers.

    Raises:
        UnsupportedModelError: they are not the loaded model's one for one.
    """
    quantized = [tensor for tensor in reader.tensors if tensor.tensor_type.name in FORMATS]
    if not quantized:
        return {}
    names, processor = _conversion(reader, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {}
    for tensor in quantized:
        name = names.get(tensor.name)
        if name is None and len(tensor.data.shape) == 2:  # no weight of this model: transformers leaves it out too
            continue
        weight = _kept(tensor, processor)
        if weight is None or name is None or name not in parameters or not _same(weight, parameters[name]):
            raise UnsupportedModelError(
                f"{tensor.name} of {source.name} ({tensor.tensor_type.name}) cannot be kept as it is stored: "
                "transformers makes another weight of it.",
                _HOW_TO_CONVERT,
            )
        for alias, parameter in parameters.items():  # a tied LM head is traced under either name
            if parameter is parameters[name]:
                kept[WEIGHT_PREFIX + alias] = weight
    return kept


def _conversion(reader: Any, model: Any) -> tuple[dict[str, str], Any]:
    """Names of the model's weights by those of the file, and what transformers changes of their values."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    config = model.config.get_text_config().to_dict()
    processor = TENSOR_PROCESSORS.get(read_field(reader, "general.architecture")[0], TensorProcessor)(config=config)
    return get_gguf_hf_weights_map(model, processor), processor


def _kept(tensor: Any, processor: Any) -> BlockWeight | None:
    """A matrix of the file with its rows in the model's order; None if it is no matrix."""
    if len(tensor.data.shape) != 2:
        return None
    data: Bytes = tensor.data
    found = FORMATS[tensor.tensor_type.name]
    numbers = np.arange(len(data), dtype=np.float64)[:, None]
    try:
        named: dict[str, Any] = {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}}
        order = processor.process(weights=numbers, name=tensor.name, **named).weights
    except (KeyError, ValueError, IndexError):  # it does more than to order rows
        return None
    if not isinstance(order, np.ndarray) or order.shape != numbers.shape:
        return None
    depth = data.shape[1] // found.num_bytes * found.num_values
    whole = BlockWeight(
        tensor.tensor_type.name, found.form, (len(data), depth), data.nbytes, lambda rows: found.read(data[rows])
    )
    return whole if np.array_equal(order, numbers) else whole.take(order[:, 0].astype(np.int64))


def _same(weight: BlockWeight, parameter: Any) -> bool:
    if tuple(parameter.shape) != weight.shape:
        return False
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, _SAMPLES).astype(np.int64))
    theirs = parameter.detach()[rows.tolist()].float().numpy()
    ours = weight.floats(rows)
    return bool(np.abs(ours - theirs).max() <= _ROUNDING * max(float(np.abs(theirs).max()), 1e-30))
