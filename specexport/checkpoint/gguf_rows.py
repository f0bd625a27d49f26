"""The weights of a GGUF file as a model of transformers has them, some rows at a time.

What transformers does to them (other names; rows of queries and keys in another order; norms less one) is asked of its
own conversion.

Of the experts of a layer a file holds a tensor of all gates, one of what these gate, and one after both. transformers
has one parameter of the first two: one below the other or row by row in turn, and turned in some models.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.checkpoint.gguf_reader import architecture, list_mtp_blocks
from specexport.checkpoint.source import Source
from specexport.checkpoint.stored import WatchedFile
from specexport.host import map_in_threads
from specexport_runtime.errors import UnsupportedModelError

_PARAMETER = re.compile(r"(?P<module>.+\.(?P<layer>\d+)\..*experts)\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?")
_TENSORS = {"gate_up": (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)), "down": (("ffn_down_exps",),)}
_OF_EXPERTS = re.compile(r"blk\.\d+\.(ffn_(gate|up|down|gate_up)_exps|ffn_(gate|up|down)\.\d+)\..+")

Rows = npt.NDArray[np.int64]
Stored = npt.NDArray[np.uint8]
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class StackedExperts(NamedTuple):
    """What a parameter of all experts of a layer is made of."""

    names: tuple[str, ...]  # of the file's tensors, [E, N, K] each, or [E, N] of biases
    in_turn: bool  # their rows take turns
    turned: bool  # the parameter is [E, K, N]

    def row_order(self, num_experts: int, num_rows: int) -> npt.NDArray[np.int64]:
        """Where each of the parameter's rows is, if the tensors of so many rows an expert lie below each other."""
        rows = np.arange(len(self.names) * num_experts * num_rows).reshape(len(self.names), num_experts, num_rows)
        order: npt.NDArray[np.int64] = rows.transpose((1, 2, 0) if self.in_turn else (1, 0, 2)).ravel()
        return order


class JoinedRows(NamedTuple):
    """What a weight is made of that no tensor of the file holds."""

    shape: tuple[int, ...]
    names: tuple[str, ...]  # of the file's tensors
    # Which rows of these, one tensor below the other; or what makes the weight of them as floats
    how: Rows | Callable[..., npt.NDArray[np.float32]]


def holds_experts(reader: Any) -> bool:
    """Whether a GGUF file has experts; no reader, no file."""
    return reader is not None and any(_OF_EXPERTS.fullmatch(tensor.name) for tensor in reader.tensors)


def find_stacks(reader: Any, model: Any) -> dict[str, StackedExperts]:
    """The parameters of a model that a file's experts make, by name."""
    there, found = {tensor.name for tensor in reader.tensors}, {}
    for name in model.state_dict():
        match = _PARAMETER.fullmatch(name)
        if match is None:
            continue
        module = model.get_submodule(match["module"])
        if not hasattr(module, "is_transposed"):
            continue
        kind = "bias" if match["bias"] else "weight"
        for parts in _TENSORS[match["part"]]:
            names = tuple(f"blk.{match['layer']}.{part}.{kind}" for part in parts)
            in_turn = match["part"] == "gate_up" and not module.is_concatenated
            if there.issuperset(names) and len(names) > in_turn:
                found[name] = StackedExperts(names, in_turn, module.is_transposed and not match["bias"])
    return found


def check_experts(source: Source, reader: Any, conversion: "Conversion | None") -> None:
    """Refuse (``UnsupportedModelError``) a file with experts that are no parameters of its model."""
    read: set[str] = set()
    if conversion is not None:
        read = {name for stack in conversion.stacks.values() for name in stack.names} | conversion.names.keys()
    modules = {str(block) for block in list_mtp_blocks(reader)}
    for tensor in reader.tensors:
        if _OF_EXPERTS.fullmatch(tensor.name) and tensor.name not in read and tensor.name.split(".")[1] not in modules:
            raise UnsupportedModelError(
                f"{source.name} holds experts that cannot be read ({tensor.name} of {architecture(reader)}).",
                "give the Hugging Face checkpoint that the file was made from, or convert that with today's llama.cpp.",
            )


class Conversion:
    """What transformers makes of a file's tensors for a model, whose weights may be on the ``meta`` device."""

    names: dict[str, str]  # of the model's weights, by those of the file
    joined: Mapping[str, JoinedRows] = {}  # by the name of the weight

    def __init__(self, reader: Any, model: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            read_field,
        )

        config = model.config.get_text_config().to_dict()
        architecture = read_field(reader, "general.architecture")[0]
        self._processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
        with _cache_name_map():
            names = get_gguf_hf_weights_map(model, self._processor, model_type=architecture)
        there = {tensor.name for tensor in reader.tensors}
        # Names of the model's weights by those of the file. A parameter that is no layer's weight has no ending, and
        # the file's tensor has one.
        self.names = {name if name in there else f"{name}.weight": found for name, found in names.items()}
        self.stacks: dict[str, StackedExperts] = find_stacks(reader, model)  # by the name of the parameter
        for stack in self.stacks.values():
            for name in stack.names:
                self.names.pop(name, None)

    def row_order(self, tensor: Any) -> Rows | None:
        """Which row of the file each row of the model's matrix is; None if it is no matrix, or more is done to it."""
        shape = tensor_shape(tensor)
        if len(shape) != 2:
            return None
        numbers = np.arange(shape[0], dtype=np.float64)[:, None]
        order = self._process_weight(numbers, tensor.name)
        if order is None or order.shape != numbers.shape or not np.array_equal(np.sort(order, axis=0), numbers):
            return None
        return order[:, 0].astype(np.int64)

    def column_order(self, tensor: Any) -> Rows | None:  # noqa: ARG002
        """Which column of the file each column of the model's matrix is; None if they are in place."""
        return None

    def small(self, tensor: Any) -> Tensor | None:  # noqa: ARG002
        """A tensor that the model has with one dimension more, whole; None for others."""
        return None

    def vector(self, tensor: Any) -> Tensor | None:
        """A tensor of one dimension, or of one row, as the model has it; None if it goes by another name then."""
        from gguf import dequantize

        found = self._process_weight(dequantize(tensor.data, tensor.tensor_type).reshape(-1), tensor.name)
        return None if found is None else torch.from_numpy(found.astype(np.float32))

    def norm(self, tensor: Any, block: int) -> Tensor:
        """A norm's weight, stored as those of the layer ``block`` are, as the model would have it."""
        from gguf import dequantize

        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found = self._process_weight(values, f"blk.{block}.attn_norm.weight")
        return torch.from_numpy(values if found is None else found)

    def _process_weight(self, values: np.ndarray, name: str) -> np.ndarray | None:
        named: dict[str, Any] = {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}}
        try:
            result = self._processor.process(weights=values, name=name, **named)
        except (KeyError, ValueError, IndexError):  # it does more than to order rows
            return None
        kept = result.name == name and not named["parsed_parameters"]["tensors"]
        return result.weights if kept and isinstance(result.weights, np.ndarray) else None


@contextmanager
def _cache_name_map() -> Iterator[None]:
    """Within the block, gguf makes its table of names once: transformers asks for it anew for each module."""
    import gguf

    makes = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(makes)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = makes


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    """Sizes of a file's tensor, outputs first."""
    return tuple(int(size) for size in reversed(tensor.shape))


class RowReader:
    """A tensor of a GGUF file as ``num_rows`` rows of one size, as they are stored: a row may be a whole matrix."""

    def __init__(self, file: WatchedFile, tensor: Any, num_rows: int) -> None:
        self._file, self._offset = file, int(tensor.data_offset)
        self._row_bytes = int(tensor.n_bytes) // num_rows

    def __call__(self, rows: Rows) -> Stored:
        """uint8 [n, bytes of a row] of some rows, read from the first to the last, or one by one if few."""
        if not len(rows):
            return np.empty((0, self._row_bytes), np.uint8)
        if int(rows.max()) - int(rows.min()) >= _FAR * len(rows):
            return np.stack(
                [self._file.read(self._offset + int(row) * self._row_bytes, self._row_bytes) for row in rows]
            )
        first, last = int(rows.min()), int(rows.max()) + 1
        offset, size = self._offset + first * self._row_bytes, (last - first) * self._row_bytes
        data = self._file.read(offset, size).reshape(last - first, self._row_bytes)
        return data if len(rows) == last - first and bool((np.diff(rows) == 1).all()) else data[rows - first]


_FAR = 32  # rows from one to the next, on an average: opening the file takes as long as reading these
_AT_ONCE = 1 << 18  # weights: what is computed from them stays in a core's cache
_FEW, _PROVEN = 512, 64  # blocks


def decode(data: Stored, kind: Any) -> npt.NDArray[np.float32]:
    """Stored rows [n, bytes of a row] as ``gguf.dequantize`` gives them, float32 [n, K], faster and on all cores.

    A few are read by it anyway. Of more, the first are held to it: where these differ, all are read by it.
    """
    from gguf import dequantize

    found, plain = FORMATS.get(kind.name), _FLOATS.get(kind.name)
    if found is None or data.size <= _FEW * found.num_bytes:
        return np.ascontiguousarray(dequantize(data, kind) if plain is None else data.view(plain), np.float32)
    flat, step = data.reshape(-1, found.num_bytes), _AT_ONCE // found.num_values
    made = np.empty((len(flat), found.num_values), np.float32)
    parts = [slice(start, start + step) for start in range(0, len(flat), step)]
    for _ in map_in_threads(lambda part: found.floats(flat[part], made[part]), parts):
        pass
    same = dequantize(flat[:_PROVEN], kind).tobytes() == made[:_PROVEN].tobytes()
    found_values: npt.NDArray[np.float32] = made.reshape(len(data), -1) if same else dequantize(data, kind)
    return found_values


def float_rows(file: WatchedFile, tensor: Any, order: Rows, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    """Reads rows of a matrix as floats: row i is row ``order[i]`` of the file; see ``StoredWeight.rows``."""
    read, kind = RowReader(file, tensor, tensor_shape(tensor)[0]), tensor.tensor_type

    def rows(start: int, stop: int) -> Tensor:
        return torch.from_numpy(decode(read(order[start:stop]), kind)).to(dtype)

    return rows


def joined_rows(
    files: Mapping[str, WatchedFile], tensors: Mapping[str, Any], joined: JoinedRows, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Reads rows of a weight made of several tensors as floats; see ``StoredWeight.rows``."""
    shapes, how = [tensor_shape(tensors[name]) for name in joined.names], joined.how

    def part(number: int, rows: Rows, kind: torch.dtype) -> Tensor:
        name = joined.names[number]
        return float_rows(files[name], tensors[name], rows, kind)(0, len(rows))

    def rows(start: int, stop: int) -> Tensor:
        if not isinstance(how, np.ndarray):
            whole = [part(i, np.arange(shape[0]), torch.float32).view(shape) for i, shape in enumerate(shapes)]
            return torch.from_numpy(how(*(each.numpy() for each in whole))[start:stop].copy()).to(dtype)
        wanted, found, begin = how[start:stop], torch.empty((stop - start, *joined.shape[1:]), dtype=dtype), 0
        for number, (height, *_) in enumerate(shapes):
            mine = np.flatnonzero((wanted >= begin) & (wanted < begin + height))
            if len(mine):
                found[torch.from_numpy(mine)] = part(number, wanted[mine] - begin, dtype)
            begin += height
        return found

    return rows


def stacked_rows(
    files: Mapping[str, WatchedFile], tensors: Mapping[str, Any], stack: StackedExperts, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Reads experts of a parameter as floats, from files and tensors by name; see ``StoredWeight.rows``."""
    shapes = [tensor_shape(tensors[name]) for name in stack.names]
    reads = [float_rows(files[name], tensors[name], np.arange(shapes[0][0]), dtype) for name in stack.names]

    def rows(start: int, stop: int) -> Tensor:
        parts = [read(start, stop).view(-1, *shape[1:]) for read, shape in zip(reads, shapes, strict=True)]
        whole = torch.stack(parts, 2).flatten(1, 2) if stack.in_turn else torch.cat(parts, 1)
        return whole.transpose(1, 2).contiguous() if stack.turned else whole

    return rows


def stacked_shape(tensors: Mapping[str, Any], stack: StackedExperts) -> tuple[int, ...]:
    """Sizes of a parameter."""
    experts, rows, *depth = tensor_shape(tensors[stack.names[0]])
    rows *= len(stack.names)
    return (experts, *depth, rows) if stack.turned else (experts, rows, *depth)
