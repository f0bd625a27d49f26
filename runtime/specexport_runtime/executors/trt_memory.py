"""Memory of one TensorRT executor: the KV arena, step inputs and outputs, and the plan that comes before any of it.

Everything belongs to one executor and stays where it is, because CUDA graphs keep addresses. Features of a target are
copied to pinned memory where they are wanted, a head's always.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import (
    K_CACHE,
    K_CACHE_OUT,
    TOKEN_FEATURES,
    V_CACHE,
    V_CACHE_OUT,
    LayerGeometry,
    StepShape,
    with_feature_size,
)
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.features import BoundFeatures, EngineFeatures
from specexport_runtime.executors.gpu import ALIGNMENT, MEMORY_HINT, ByteArray, GpuDriver, GpuInfo, gib
from specexport_runtime.executors.trt_engine import EngineTensor
from specexport_runtime.executors.trt_pack import SPECS, Plan


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class MemoryPlan(NamedTuple):
    """Bytes of device memory that an executor will need."""

    weights: int  # the engine, about as large as its file
    kv_cache: int  # the arena of ``num_rows`` rows
    activations: int  # what the largest profile needs while it runs
    buffers: int  # step inputs and outputs
    num_rows: int  # rows of the arena, no bytes

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations + self.buffers

    def check(self, what: str, gpu: GpuInfo) -> None:
        """Refuse a plan that does not fit, before anything is allocated.

        The IncompatibleError names what is needed for what, and what is free.
        """
        if self.total <= gpu.free_bytes:
            return
        raise IncompatibleError(
            f"{what} needs {gib(self.total)} of GPU memory (weights {gib(self.weights)}, KV cache of {self.num_rows} "
            f"rows {gib(self.kv_cache)}, activations {gib(self.activations)}, buffers {gib(self.buffers)}); {gpu.name} "
            f"has {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}.",
            MEMORY_HINT,
        )


class CacheTensor(NamedTuple):
    """One cache of the arena."""

    name: str  # the engine's input
    out_name: str  # the engine's output, in the same memory
    offset: int  # bytes from the arena's start
    heads: int  # KV heads
    head_bytes: int  # of one head of one row: L entries
    entry_bytes: int  # of one entry of one head
    shape: tuple[int, int, int]  # of one row, [H, L, D]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.heads * self.head_bytes


def lay_out_caches(
    layers: Sequence[LayerGeometry], num_rows: int, kv_capacity: int, item_bytes: int
) -> tuple[tuple[CacheTensor, ...], int]:
    """The caches of an arena, [num_rows, H, L, D] each, and its bytes; IncompatibleError if a row is not aligned."""
    caches, offset = [], 0
    for i, layer in enumerate(layers):
        for name, out, dim in ((K_CACHE, K_CACHE_OUT, layer.k_dim), (V_CACHE, V_CACHE_OUT, layer.v_dim)):
            entry_bytes = dim * item_bytes
            shape = (layer.kv_heads, kv_capacity, dim)
            tensor = CacheTensor(
                name.name.format(i=i),
                out.name.format(i=i),
                offset,
                layer.kv_heads,
                kv_capacity * entry_bytes,
                entry_bytes,
                shape,
            )
            if tensor.row_bytes % ALIGNMENT and num_rows > 1:
                raise IncompatibleError(
                    f"a row of {tensor.name} has {tensor.row_bytes} bytes, no multiple of {ALIGNMENT}, so that rows "
                    "cannot be bound by address.",
                    "use --max-num-seqs 1, or build it again with another --max-model-len.",
                )
            caches.append(tensor)
            offset += aligned(tensor.row_bytes * num_rows)
    return tuple(caches), offset


class KvMemory:
    """The KV arena: zeroed, because attention multiplies masked entries by 0, and 0 times NaN is NaN."""

    def __init__(self, driver: GpuDriver, caches: Sequence[CacheTensor], num_bytes: int, address: int) -> None:
        self._driver, self._caches, self._address = driver, caches, address
        self.num_bytes = num_bytes
        driver.clear(address, num_bytes)

    def addresses(self, row: int) -> Iterator[tuple[CacheTensor, int]]:
        """Each cache, and where its ``row`` begins."""
        for cache in self._caches:
            yield cache, self._address + cache.offset + row * cache.row_bytes

    def clear_row(self, row: int) -> None:
        """Zero a row in every cache."""
        for cache, address in self.addresses(row):
            self._driver.clear(address, cache.row_bytes)

    def read_entries(self, row: int, start: int, stop: int, dtype: str) -> dict[str, npt.NDArray[np.float32]]:
        """The entries ``[start, stop)`` of a row, float32 [H, entries, D] for each cache by the name of its input."""
        found = {}
        for cache, address in self.addresses(row):
            size = (stop - start) * cache.entry_bytes
            memory = self._driver.allocate_host(cache.heads * size)
            for head in range(cache.heads):
                source = address + head * cache.head_bytes + start * cache.entry_bytes
                self._driver.copy_out(int(memory.ctypes.data) + head * size, source, size)
            self._driver.synchronize()
            found[cache.name] = _as_float32(memory, dtype).reshape(cache.heads, stop - start, cache.shape[2])
            self._driver.free_host(memory)
        return found

    def copy_row(self, source: int, destination: int, kv_len: int) -> None:
        """Copy the first ``kv_len`` entries of a row to another, in every cache."""
        if not kv_len:
            return
        for (cache, begin), (_, end) in zip(self.addresses(source), self.addresses(destination), strict=True):
            self._driver.copy_rows(end, begin, kv_len * cache.entry_bytes, cache.heads, cache.head_bytes)


def _as_float32(memory: ByteArray, dtype: str) -> npt.NDArray[np.float32]:
    """A copy of what lies in ``memory``; numpy has no bfloat16, which is the upper half of a float32."""
    if dtype == "bfloat16":
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return memory.view(dtype).astype(np.float32)


class InputTensor(NamedTuple):
    """A step input in a block of memory that is copied to the device as one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


def lay_out_inputs(
    names: Sequence[str], shape: StepShape, feature_size: int = 0
) -> tuple[tuple[InputTensor, ...], int]:
    """Step inputs of one size, one behind the other, and the bytes of all; ``feature_size`` is E of a draft head."""
    tensors, offset = [], 0
    for name in names:
        size = shape.shape_of(with_feature_size(SPECS[name], feature_size))
        tensors.append(InputTensor(name, size, SPECS[name].dtype, offset))
        offset += aligned(int(np.prod(size)) * np.dtype(SPECS[name].dtype).itemsize)
    return tuple(tensors), offset


class HostBlock:
    """Pinned memory that step inputs are gathered in. A fixed profile has one to itself, ranged ones share one."""

    def __init__(self, memory: ByteArray) -> None:
        self._memory = memory
        self.address = int(memory.ctypes.data)
        self.plan: object = None  # of the step whose constant inputs it holds

    def views(self, tensors: Sequence[InputTensor]) -> Mapping[str, npt.NDArray[Any]]:
        """Arrays over the block."""
        return {
            tensor.name: np.ndarray(tensor.shape, tensor.dtype, buffer=self._memory.data, offset=tensor.offset)
            for tensor in tensors
        }


class HostOutput:
    """Pinned memory for the largest output of a kind, allocated when first needed: greedy decoding needs no logits."""

    def __init__(self, driver: GpuDriver, shape: tuple[int, ...], dtype: str) -> None:
        self._driver, self._shape, self._dtype = driver, shape, np.dtype(dtype)
        self._memory: ByteArray | None = None
        self.row_bytes = int(np.prod(shape[1:])) * self._dtype.itemsize
        self.address = 0
        self.array: npt.NDArray[Any] = np.empty((0, *shape[1:]), self._dtype)

    def open(self) -> None:
        """Allocate it, if that has not been done."""
        if self._memory is None:
            self._memory = self._driver.allocate_host(self.row_bytes * self._shape[0])
            self.address = int(self._memory.ctypes.data)
            self.array = np.ndarray(self._shape, self._dtype, buffer=self._memory.data)

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more."""
        if self._memory is not None:
            self.array = self.array[:0].copy()
            self._driver.free_host(self._memory)
            self._memory = None


class TrtFeatures(EngineFeatures):
    """The features of one engine; at ``address`` and in ``host`` is room for the largest step."""

    def __init__(
        self, tensors: Sequence[EngineTensor], size: int, where: str, driver: GpuDriver, address: int, host: HostOutput
    ) -> None:
        super().__init__({tensor.name: tensor.shape for tensor in tensors}, size, where, gated=False)
        self.address = address
        self._driver, self._host = driver, host

    def copy_out(self, shape: StepShape) -> None:
        """Put the copy of a step's features on the stream, if they are needed; ``shape`` is the step in the engine."""
        if self.reads or (self.gives and self.wanted):
            self._host.open()
            rows = shape.num_tokens if self.gives else shape.num_logit_rows
            self._driver.copy_out(self._host.address, self.address, rows * self._host.row_bytes)

    def bound(self, plan: Plan, num_logit_rows: int) -> BoundFeatures:
        """What was copied of a step that is done, without the rows of dummies: R is that of the step before padding."""
        if self.reads:
            return BoundFeatures(handed_on=self._host.array[:num_logit_rows])
        return BoundFeatures(given=self._host.array[plan.tokens] if self.gives and self.wanted else None)


def feature_rows(entry: ModelEntry, profiles: Sequence[Profile]) -> int:
    """Most features that a step of an engine gives: one for each token, or for each row of logits of a head."""
    if not entry.engine.feature_size:
        return 0
    reads = TOKEN_FEATURES.name in entry.engine.inputs
    return max(profile.num_logit_rows if reads else profile.num_tokens for profile in profiles)
