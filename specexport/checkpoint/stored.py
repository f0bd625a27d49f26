"""Weights that stay in their files: where each parameter of a model comes from, read when it is asked for."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexport.checkpoint.source import file_state
from specexport_runtime.errors import CheckpointError

CHUNK = 1 << 24  # elements worked on at a time where a weight need not be whole


@dataclass(frozen=True)
class StoredWeight:
    """A parameter that is in no memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Gives rows ``start`` to ``stop`` along the first dimension, in ``dtype``; each call reads anew
    rows: Callable[[int, int], Tensor]

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    def whole(self) -> Tensor:
        """All of it."""
        return self.rows(0, self.shape[0])

    def parts(self) -> Iterator[Tensor]:
        """Its rows, some at a time."""
        return (self.rows(start, stop) for start, stop in self.chunks())

    def equals(self, other: "StoredWeight") -> bool:
        """Whether another one has the same shape and values; reads until they differ."""
        return self.shape == other.shape and all(map(torch.equal, self.parts(), other.parts()))

    def chunks(self, size: int = CHUNK) -> list[tuple[int, int]]:
        """Bounds of the rows that are worked on at a time, ``size`` elements or one row."""
        step = max(1, size // max(1, self.row_size))
        return [(start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step)]


WEIGHT_PREFIX = "model."
"""What a traced graph puts before the checkpoint's name of a weight: the model is a member of what is traced."""
Stored = Mapping[str, StoredWeight]
"""By name of the parameter; a tied one is under each of its names."""


class WatchedFile:
    """A file that must stay as it was while it is read piece by piece; ``name`` is the checkpoint's, for messages."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._name = path, name
        self._state = file_state(path)

    def check(self) -> None:
        """Raise ``CheckpointError`` if the file was written or removed meanwhile."""
        try:
            same = file_state(self.path) == self._state
        except OSError:
            same = False
        if not same:
            raise CheckpointError(
                f"checkpoint {self._name} changed while it was read ({self.path.name}).", "build again."
            )

    def read(self, offset: int, num_bytes: int) -> np.ndarray:
        """A copy, uint8 [num_bytes], from ``offset``: a mapping would stay resident. CheckpointError if it changed."""
        self.check()
        found: np.ndarray = np.fromfile(self.path, np.uint8, num_bytes, offset=offset)
        if found.size != num_bytes:
            raise CheckpointError(f"{self._name}: {self.path.name} ends too early.", "fetch the checkpoint again.")
        return found


def stored_by_id(model: Any, stored: Stored) -> dict[int, StoredWeight]:
    """Stored weights by the identity of their parameters, which are on the ``meta`` device."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {id(parameters[name]): weight for name, weight in stored.items()}


def stored_tensor(name: str, weight: StoredWeight) -> Any:
    """A weight as a tensor of ONNX IR, whose data are read when they are asked for: all, or some rows."""
    from specexport.onnx_emit import lazy_tensor

    def rows(axis: int, start: int, stop: int) -> np.ndarray:
        return _array(weight.rows(start, stop) if axis == 0 else weight.whole().narrow(axis, start, stop - start))

    return lazy_tensor(name, _KINDS[weight.dtype], weight.shape, part=rows)


_KINDS = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # numpy has none of its own
        import ml_dtypes

        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array
