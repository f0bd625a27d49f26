"""Finding out which stored tensor each parameter of a model is, without reading one.

Only transformers knows what it renames, ties, joins or turns. So it loads tensors of the right shapes with memory for
one column, repeated: a parameter that still lies there is that tensor. If one does not, the model is loaded whole.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.gguf_rows import (
    Conversion,
    float_rows,
    joined_rows,
    stacked_rows,
    stacked_shape,
    tensor_shape,
)
from specexport.checkpoint.source import Source
from specexport.checkpoint.stored import StoredWeight, WatchedFile
from specexport.checkpoint.streaming import replace_parameters

SMALLEST_RANK = 2
"""Vectors (norms, biases) are small, and are loaded."""
_MARK = 1.40625  # exact in every dtype, and nothing that a model initializes weights with


class _Tag(NamedTuple):
    """What stands for a stored tensor."""

    tensor: Tensor
    weight: StoredWeight


class Tags:
    """The tensors that stand for stored ones, by where they lie."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._made: dict[int, _Tag] = {}

    def make(self, shape: tuple[int, ...], rows: Callable[[int, int], Tensor]) -> Tensor:
        """A tensor of ``shape`` that stands for the one whose rows ``rows`` gives."""
        column = torch.full(shape[:1], _MARK, dtype=self.dtype)
        tag = column.view(shape[0], *[1] * (len(shape) - 1)).expand(shape)
        # It stays, so that the place is not given to another.
        self._made[tag.data_ptr()] = _Tag(tag, StoredWeight(shape, self.dtype, rows))
        return tag

    @contextmanager
    def patch_tie_check(self) -> Iterator[None]:
        """Within the block, transformers finds two tags equal where what they stand for is: it ties no others."""
        from transformers import modeling_utils

        equal = modeling_utils._tied_params_are_equal

        def same(one: Tensor, other: Tensor) -> bool:
            pair = [self._made.get(each.data_ptr()) for each in (one, other)]
            if pair[0] is None or pair[1] is None:
                return bool(equal(one, other))
            return pair[0].weight.equals(pair[1].weight)

        modeling_utils._tied_params_are_equal = same
        try:
            yield
        finally:
            modeling_utils._tied_params_are_equal = equal

    def resolve_tags(self, model: Any) -> dict[str, StoredWeight] | None:
        """Replace stand-ins by parameters without data; gives each one's origin, or None if one was made otherwise."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        stored, meta = {}, {}
        for name, parameter in parameters.items():
            tag = self._made.get(parameter.data_ptr())
            if tag is None and parameter.dim() < SMALLEST_RANK:
                continue
            if tag is None or parameter.dtype != self.dtype:
                return None
            if (parameter.shape, parameter.stride()) != (tag.tensor.shape, tag.tensor.stride()):  # turned, or cut
                return None
            if not bool((tag.tensor.flatten(1)[:, 0] == _MARK).all()):  # given other values
                return None
            stored[name] = tag.weight
            meta[id(parameter)] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        replace_parameters(model, meta)
        return stored


@contextmanager
def tag_safetensors(source: Source, tags: Tags) -> Iterator[None]:
    """Within the block, transformers opens safetensors files and finds tags in them."""
    from transformers import modeling_utils

    opens = modeling_utils.safe_open

    class Tagged:
        """What is asked of an open file."""

        def __init__(self, path: Any, **named: Any) -> None:
            self._file = opens(path, **named).__enter__()
            self._path = WatchedFile(Path(path), source.name)

        def keys(self) -> list[str]:
            """Names of the tensors."""
            return list(self._file.keys())

        def get_slice(self, name: str) -> Tensor:
            """A tag, or the tensor itself where it is a vector."""
            found = self._file.get_slice(name)
            shape = tuple(found.get_shape())
            if len(shape) < SMALLEST_RANK or found.get_dtype() not in _FLOATS:
                tensor: Tensor = self._file.get_tensor(name).clone()
                return tensor
            return tags.make(shape, _SafetensorsRows(self._path, name, tags.dtype))

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

    modeling_utils.safe_open = Tagged
    try:
        yield
    finally:
        modeling_utils.safe_open = opens


_FLOATS = {"F64", "F32", "F16", "BF16"}


class _SafetensorsRows:
    """Rows of a tensor in a safetensors file, which is opened for each reading: what is mapped stays resident."""

    def __init__(self, file: WatchedFile, name: str, dtype: torch.dtype) -> None:
        self._file, self._name, self._dtype = file, name, dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        """See ``StoredWeight.rows``."""
        from safetensors import safe_open

        self._file.check()
        with safe_open(self._file.path, framework="pt") as file:
            found: Tensor = file.get_slice(self._name)[start:stop]
            return found.to(self._dtype, copy=True)


def tag_gguf(source: Source, reader: Any, conversion: Conversion, tags: Tags) -> dict[str, Tensor] | None:
    """Tags for a GGUF file's matrices and vectors; None if transformers does more to one than order its rows."""
    found = gguf_weights(source, reader, conversion, tags.dtype)
    if found is None:
        return None
    return {
        name: tags.make(weight.shape, weight.rows) if isinstance(weight, StoredWeight) else weight
        for name, weight in found.items()
    }


def gguf_weights(
    source: Source, reader: Any, conversion: Conversion, dtype: torch.dtype
) -> dict[str, StoredWeight | Tensor] | None:
    """Where a model's matrices are in a GGUF file, and its vectors themselves; None as with :func:`tag_gguf`."""
    watched = {path: WatchedFile(path, source.name) for path in source.files}
    files = {name: watched[path] for name, path in reader.paths.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found: dict[str, StoredWeight | Tensor] = {
        name: StoredWeight(stacked_shape(tensors, stack), dtype, stacked_rows(files, tensors, stack, dtype))
        for name, stack in conversion.stacks.items()
    } | {
        name: StoredWeight(joined.shape, dtype, joined_rows(files, tensors, joined, dtype))
        for name, joined in conversion.joined.items()
    }
    for tensor in reader.tensors:
        name, shape = conversion.names.get(tensor.name), tensor_shape(tensor)
        if name is None:  # no weight of this model: transformers leaves it out too
            continue
        if len(shape) < SMALLEST_RANK or shape[0] == 1:
            vector = conversion.vector(tensor)
            if vector is None:
                return None
            is_row = max(len(shape), vector.dim()) >= SMALLEST_RANK
            row = StoredWeight((1, vector.numel()), dtype, partial(_slice_vector, vector, dtype))
            found[name] = row if is_row else vector
            continue
        whole = conversion.small(tensor)
        if whole is not None:
            found[name] = StoredWeight(tuple(whole.shape), dtype, partial(_slice_rows, whole, dtype))
            continue
        columns = conversion.column_order(tensor)
        order = np.arange(shape[0]) if columns is not None else conversion.row_order(tensor)
        if order is None:
            return None
        rows = float_rows(files[tensor.name], tensor, order, dtype)
        in_place = columns is None
        found[name] = StoredWeight(
            shape, dtype, rows if in_place else partial(_reorder_columns, rows, torch.from_numpy(columns))
        )
    return found


def _slice_rows(whole: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return whole[start:stop].to(dtype)


def _reorder_columns(rows: Callable[[int, int], Tensor], columns: Tensor, start: int, stop: int) -> Tensor:
    return rows(start, stop)[:, columns]


def _slice_vector(vector: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return vector.view(1, -1)[start:stop].to(dtype)
