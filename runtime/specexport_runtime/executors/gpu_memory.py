"""Memory that a host and a GPU share, for executors of any engine: inputs copied as one block, outputs brought back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import StepShape
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.executors.features import BoundFeatures, EngineFeatures
from specexport_runtime.executors.gpu import ALIGNMENT, ByteArray, GpuDriver

ID_BYTES = 8
"""Of a token id, in and out of an engine."""


def align_up(num_bytes: int) -> int:
    """``num_bytes`` rounded up to ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class InputTensor(NamedTuple):
    """A step input in a block of memory that is copied to the device as one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


def lay_out(inputs: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[InputTensor, ...], int]:
    """Step inputs (name, shape, numpy dtype) one after the other, and the bytes of all."""
    tensors, offset = [], 0
    for name, shape, dtype in inputs:
        tensors.append(InputTensor(name, shape, dtype, offset))
        offset += align_up(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return tuple(tensors), offset


class HostBlock:
    """Pinned memory that the inputs of a step are gathered in."""

    def __init__(self, memory: ByteArray) -> None:
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self.plan: object = None  # of the step whose constant inputs it holds

    def views(self, tensors: Sequence[InputTensor]) -> Mapping[str, npt.NDArray[Any]]:
        """Arrays over the block."""
        return {
            tensor.name: np.ndarray(tensor.shape, tensor.dtype, buffer=self.memory.data, offset=tensor.offset)
            for tensor in tensors
        }


class HostOutput:
    """Pinned memory for an output [rows, ...], allocated when first needed: greedy decoding needs no logits."""

    def __init__(self, driver: GpuDriver, row_shape: tuple[int, ...], dtype: str, num_rows: int = 0) -> None:
        self._driver, self._row_shape, self._dtype, self._num_rows = driver, row_shape, np.dtype(dtype), num_rows
        self._memory: ByteArray | None = None
        self.row_bytes = int(np.prod(row_shape)) * self._dtype.itemsize
        self.address = 0
        self.array: npt.NDArray[Any] = np.empty((0, *row_shape), self._dtype)

    def open(self, num_rows: int = 0) -> None:
        """Make room for so many rows, or for those it was made for; what lay in a smaller one is gone."""
        if self._memory is not None and num_rows <= len(self.array):
            return
        self.close()
        rows = max(num_rows, self._num_rows)
        self._memory = self._driver.allocate_host(self.row_bytes * rows)
        self.address = int(self._memory.ctypes.data)
        self.array = np.ndarray((rows, *self._row_shape), self._dtype, buffer=self._memory.data)

    def fetch(self, source: int, num_rows: int) -> None:
        """Put the copy of the first rows of an output on the stream, from its device address."""
        self.open(num_rows)
        self._driver.copy_out(self.address, source, num_rows * self.row_bytes)

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more."""
        if self._memory is not None:
            self.array = self.array[:0].copy()
            self._driver.free_host(self._memory)
            self._memory = None


class GpuFeatures(EngineFeatures):
    """An engine's features on a GPU, computed in every step; a target's come to the host where they are wanted."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int | str | None]],
        size: int,
        where: object,
        driver: GpuDriver,
        num_rows: int = 0,  # of the largest step, where that is known
    ) -> None:
        super().__init__(shapes, size, where, gated=False)
        self._host = HostOutput(driver, (size,), "float32", num_rows)

    def num_rows(self, shape: StepShape) -> int:
        """Rows that a step of the engine gives."""
        return shape.num_tokens if self.gives else shape.num_logit_rows if self.reads else 0

    def copy_out(self, shape: StepShape, address: int) -> None:
        """Put the copy of a step's features on the stream, if they are needed; ``shape`` is the step in the engine."""
        if self.reads or (self.gives and self.wanted):
            self._host.fetch(address, self.num_rows(shape))

    def bound(self, tokens: "Int64Array | slice", num_logit_rows: int) -> BoundFeatures:
        """What was copied of a step that is done: of its ``tokens`` among the engine's, or of R rows of logits."""
        if self.reads:
            return BoundFeatures(handed_on=self._host.array[:num_logit_rows])
        return BoundFeatures(given=self._host.array[tokens] if self.gives and self.wanted else None)

    def close(self) -> None:
        """Give the pinned memory back."""
        self._host.close()
