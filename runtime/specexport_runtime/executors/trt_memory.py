"""Memory of one TensorRT executor: the KV arena, step inputs, and the plan that comes before any of it.

Everything belongs to one executor and stays where it is, because CUDA graphs keep addresses.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
from specexport_runtime.executors.gpu import ALIGNMENT, MEMORY_HINT, ByteArray, GpuDriver, GpuInfo, format_gib
from specexport_runtime.executors.gpu_memory import InputTensor, align_up, lay_out
from specexport_runtime.executors.trt_pack import SPECS


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
        """Refuse a plan that does not fit, before anything is allocated; the error says what is needed, and free."""
        if self.total <= gpu.free_bytes:
            return
        raise IncompatibleError(
            f"{what} needs {format_gib(self.total)} of GPU memory (weights {format_gib(self.weights)}, KV cache of {self.num_rows} "
            f"rows {format_gib(self.kv_cache)}, activations {format_gib(self.activations)}, buffers {format_gib(self.buffers)}); {gpu.name} "
            f"has {format_gib(gpu.free_bytes)} free of {format_gib(gpu.total_bytes)}.",
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
            offset += align_up(tensor.row_bytes * num_rows)
    return tuple(caches), offset


def compute_swap_bytes(caches: Sequence[CacheTensor]) -> int:
    """Bytes of a row of the largest cache: where one lies while two rows are exchanged, cache after cache."""
    return max((cache.row_bytes for cache in caches), default=0)


class KvMemory:
    """The KV arena, zeroed (0 times NaN is NaN), with room for :func:`compute_swap_bytes` at ``aside``."""

    def __init__(
        self, driver: GpuDriver, caches: Sequence[CacheTensor], num_bytes: int, address: int, aside: int
    ) -> None:
        self._driver, self._caches, self._address, self._aside = driver, caches, address, aside
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
        for (cache, begin), (_, end) in zip(self.addresses(source), self.addresses(destination), strict=True):
            self._copy(cache, begin, end, kv_len)

    def swap_rows(self, one: int, other: int, kv_lens: tuple[int, int]) -> None:
        """Exchange the first entries of two rows, in every cache: ``kv_lens`` of ``one`` and of ``other``."""
        for (cache, first), (_, second) in zip(self.addresses(one), self.addresses(other), strict=True):
            aside = self._aside if kv_lens[1] else first  # nothing overwrites what goes straight to its place
            if kv_lens[1]:
                self._copy(cache, first, aside, kv_lens[0])
                self._copy(cache, second, first, kv_lens[1])
            self._copy(cache, aside, second, kv_lens[0])

    def _copy(self, cache: CacheTensor, source: int, destination: int, entries: int) -> None:
        """Copy the first entries of each head of a row; rows are given by where they begin."""
        if entries:
            self._driver.copy_rows(destination, source, entries * cache.entry_bytes, cache.heads, cache.head_bytes)


def _as_float32(memory: ByteArray, dtype: str) -> npt.NDArray[np.float32]:
    """A copy of what lies in ``memory``; numpy has no bfloat16, which is the upper half of a float32."""
    if dtype == "bfloat16":
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return memory.view(dtype).astype(np.float32)


def lay_out_inputs(
    names: Sequence[str], shape: StepShape, feature_size: int = 0
) -> tuple[tuple[InputTensor, ...], int]:
    """Step inputs of one size, one after the other, and the bytes of all; ``feature_size`` is E of a draft head."""
    specs = [with_feature_size(SPECS[name], feature_size) for name in names]
    return lay_out((spec.name, shape.shape_of(spec), spec.dtype) for spec in specs)


def count_feature_rows(entry: ModelEntry, profiles: Sequence[Profile]) -> int:
    """Most features that a step of an engine gives: one for each token, or for each row of logits of a head."""
    if not entry.engine.feature_size:
        return 0
    reads = TOKEN_FEATURES.name in entry.engine.inputs
    return max(profile.num_logit_rows if reads else profile.num_tokens for profile in profiles)
