"""GGUF files whose conversion transformers describes as a list of renamings and operations: Qwen3.5's architectures.

Their layers of linear attention are stored with value heads in another order, and norms one larger.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.gguf_layouts import LAYOUTS, LayoutConversion
from specexport.checkpoint.gguf_reader import architecture
from specexport.checkpoint.gguf_rows import Conversion, Rows, find_stacks


def has_tensor_mapping(arch: str) -> bool:
    """Whether a file of an architecture is read by a description of its tensors, and not by transformers' own code."""
    return arch in _DESCRIBED


class MappedConversion(Conversion):
    """As :class:`Conversion`, of Qwen3.5's architectures."""

    def __init__(self, reader: Any, model: Any) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming
        from transformers.integrations.gguf import get_gguf_conversion_mapping

        mapping = get_gguf_conversion_mapping(architecture(reader), model.config.get_text_config())
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        own = set(model.state_dict())
        found = {tensor.name: self._rename(tensor.name)[0] for tensor in reader.tensors}
        self.stacks = find_stacks(reader, model)
        parts = {part for stack in self.stacks.values() for part in stack.names}
        self.names = {name: theirs for name, theirs in found.items() if theirs in own and name not in parts}

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(name, self._renamings, self._converters)
        return found

    def _process_weight(self, values: np.ndarray, name: str) -> np.ndarray | None:
        _, pattern = self._rename(name)
        tensor = torch.from_numpy(np.array(values))
        for converter in self._converters:
            if pattern in converter.source_patterns:
                for operation in converter.operations:
                    try:
                        (tensor,) = operation.convert({name: tensor}, [name], [name]).values()
                    except IndexError:  # it orders rows or columns, and is given one
                        return None
        result: np.ndarray = tensor.numpy()
        return result

    def column_order(self, tensor: Any) -> Rows | None:
        """Which column of the file each column of the model's matrix is; None if they are in place."""
        numbers = np.arange(int(tensor.shape[0]), dtype=np.float64)[None]
        order = self._process_weight(numbers, tensor.name)
        if order is None or order.shape != numbers.shape or np.array_equal(order, numbers):
            return None
        columns: Rows = order[0].astype(np.int64)
        return columns

    def small(self, tensor: Any) -> Tensor | None:
        """A tensor that the model has with one dimension more, whole; None for others."""
        from gguf import dequantize

        if not tensor.name.endswith(".ssm_conv1d.weight"):
            return None
        found = self._process_weight(dequantize(tensor.data, tensor.tensor_type), tensor.name)
        return None if found is None else torch.from_numpy(found)


def convert(reader: Any, model: Any) -> Conversion:
    """What transformers makes of a file's tensors for a model."""
    return _DESCRIBED.get(architecture(reader), Conversion)(reader, model)


_DESCRIBED: dict[str, type[Conversion]] = {
    **dict.fromkeys(LAYOUTS, LayoutConversion), **dict.fromkeys(("qwen35", "qwen35moe"), MappedConversion),
}  # fmt: skip
