"""The KV arena of an engine on the CPU: an anonymous mapping for each cache, of which a page takes memory once written.

::

    k_cache.0:   row 0  head 0  [written pages | pages of nothing   ]
                        head 1  [written pages | pages of nothing   ]
                 row 1  …

A row has its full length in addresses, and memory only as far as it was written to. On Linux memory also goes back page
by page, so that short texts in long rows cost what short rows would: what vAttention (Prabhu et al. 2024) does with a
GPU's page tables, the system does here by itself. Nothing moves, and a step sees the same addresses as ever.
"""

import math
import mmap
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import LayerGeometry, StateGeometry, cache_shapes, state_shapes
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import MAX_BEHIND_WINDOW, Executor, Int64Array
from specexport_runtime.machine import describe_memory_shortage

CAN_GIVE_BACK = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")
"""Elsewhere the system may keep the pages, or bring their values back."""
_PAGE = mmap.PAGESIZE


class CacheMemory(NamedTuple):
    """One cache of the arena."""

    mapping: mmap.mmap  # private to this process: a child that is forked has a copy
    array: npt.NDArray[Any]  # the same memory as [rows, 1, H, L, D]

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> "CacheMemory":
        """A cache of zeros, of which no page is resident; ``np.zeros`` may clear freed memory by writing."""
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        mapping = mmap.mmap(-1, size, flags=_FLAGS) if _FLAGS else mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one value would make 2 MB resident
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        return cls(mapping, np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape))

    def release_pages(self, row: int, first: int, stop: int) -> None:
        """Give pages back that have nothing but entries ``[first, stop)`` of a row; they are zeros again."""
        heads, capacity = self.array.shape[2:4]
        entry = self.array.strides[3]
        if first == 0 and stop == capacity:
            self.give_back_row(row)
            return
        for head in range(heads):
            start = row * self.array.strides[0] + head * self.array.strides[2]
            self._give_back(start + first * entry, (stop - first) * entry)

    def give_back_row(self, row: int) -> None:
        """Give the pages back that have nothing but a row."""
        self._give_back(row * self.array.strides[0], self.array.strides[0])

    def _give_back(self, start: int, size: int) -> None:
        begin, end = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
        if end > begin:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def paged_capacity(layers: Sequence[LayerGeometry], kv_capacity: int, item_bytes: int) -> int:
    """Entries of a row, at least ``kv_capacity``, with which each head of each row begins a page in every layer."""
    dims = {dim for layer in layers for dim in (layer.k_dim, layer.v_dim)}
    step = math.lcm(*(_PAGE // math.gcd(_PAGE, dim * item_bytes) for dim in dims))
    return -(-kv_capacity // step) * step


class ArenaRows(Executor):
    """The rows of an engine's caches: copies, moves, and memory that is given back."""

    copies_rows = True
    _windows: Sequence[int] = ()
    _memory: Mapping[str, CacheMemory]
    _state_memory: Mapping[str, CacheMemory] = MappingProxyType({})

    def make_arena(self, layers: Sequence[LayerGeometry], dtype: npt.DTypeLike, windows: Sequence[int] = ()) -> None:
        """Make the caches, of layers that see ``windows`` (-1 for all); IncompatibleError if there is no memory."""
        item = np.dtype(dtype).itemsize
        self.recedes = CAN_GIVE_BACK and any(window > 0 for window in windows)
        self._windows = windows if self.recedes else ()
        is_paged = (self.gives_back or self.recedes) and layers
        capacity = paged_capacity(layers, self.kv_capacity, item) if is_paged else self.kv_capacity
        shapes = cache_shapes(layers, self.num_rows, capacity)
        try:
            self._memory = {name: CacheMemory.make(shape, dtype) for name, shape in shapes.items()}
        except (OSError, OverflowError, MemoryError):
            size = sum(map(math.prod, shapes.values())) * item
            raise IncompatibleError(
                f"a KV cache of {self.num_rows} {'row' if self.num_rows == 1 else 'rows'} of {self.kv_capacity} "
                f"entries: {describe_memory_shortage(size)}.",
                "give a smaller --max-num-seqs or --max-model-len.",
            ) from None
        # Heads of one row, by bytes of an entry: layers are alike, so that there are one or two sizes.
        self._heads: Counter[tuple[int, int]] = Counter()
        for i, (heads, *dims) in enumerate(layers):
            for dim in dims:
                self._heads[dim * item, self._windows[i] if self._windows else -1] += heads

    def _find_first_readable(self, name: str, floor: int) -> int:
        """The first entry of a cache that may be read after ``floor`` tokens."""
        window = self._windows[int(name.rpartition(".")[2])] if self._windows else -1
        return max(0, floor - window + 1) if window > 0 else 0

    def recede(self, row: int, floor: int) -> None:
        """See ``Executor.recede``."""
        for name, memory in self._memory.items():
            if first := self._find_first_readable(name, floor):
                memory.release_pages(row, 0, first)

    def make_states(self, states: Sequence[StateGeometry], num_pending: int) -> None:
        """Make the states of recurrences, and what waits beside them."""
        shapes = state_shapes(states, self.num_rows, num_pending)
        self._state_memory = {name: CacheMemory.make(shape, np.float32) for name, shape in shapes.items()}

    @property
    def _states(self) -> dict[str, npt.NDArray[Any]]:
        return {name: memory.array for name, memory in self._state_memory.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a row, with what waits beside them."""
        return sum(memory.array[0].nbytes for memory in self._state_memory.values())

    @property
    def _caches(self) -> dict[str, npt.NDArray[Any]]:
        return {name: memory.array for name, memory in self._memory.items()}

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV arena; a row is resident only as far as it was written to."""
        return sum(memory.array.nbytes for memory in self._memory.values())

    def row_bytes(self, entries: int) -> int:
        """See ``Executor.row_bytes``."""
        states = self.state_bytes if entries else 0
        for (size, window), heads in self._heads.items():
            count = min(entries, window + MAX_BEHIND_WINDOW) if window > 0 else entries
            states += heads * (-(-count * size // _PAGE) * _PAGE)
        return states

    def release_pages(self, row: int, kept: int) -> None:
        """See ``Executor.release_pages``."""
        if self.gives_back:
            for memory in self._memory.values():
                memory.release_pages(row, kept, memory.array.shape[3])
            if not kept:
                for memory in self._state_memory.values():
                    memory.give_back_row(row)

    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """Copy the first ``kv_len`` entries of a row to another, in every layer."""
        self.copy_row(source, destination, kv_len)

    def copy_row(self, source: int, destination: int, kv_len: int, floor: int = 0) -> None:
        """As :meth:`move_row`, which leaves the source as it is; of a row that has receded to ``floor``."""
        for name, memory in self._memory.items():
            first = min(self._find_first_readable(name, floor), kv_len)
            memory.array[destination, :, :, first:kv_len] = memory.array[source, :, :, first:kv_len]
            if first:
                memory.release_pages(destination, 0, first)
        for state in self._states.values():
            state[destination] = state[source]

    def swap_rows(self, one: int, other: int, kv_lens: tuple[int, int], floors: tuple[int, int] = (0, 0)) -> None:
        """Exchange the first ``kv_lens`` entries of two rows, layer by layer; rows recede to their ``floors`` there."""
        of_one, of_other = kv_lens
        for name, memory in self._memory.items():
            cache = memory.array
            begin, start = (
                min(self._find_first_readable(name, floor), n) for floor, n in zip(floors, kv_lens, strict=True)
            )
            aside = cache[one, :, :, begin:of_one]
            aside = aside.copy() if of_other else aside
            cache[one, :, :, start:of_other] = cache[other, :, :, start:of_other]
            cache[other, :, :, begin:of_one] = aside
            for row, first in ((one, start), (other, begin)):
                if first:
                    memory.release_pages(row, 0, first)
            if self.gives_back:
                memory.release_pages(one, of_other, cache.shape[3])
                memory.release_pages(other, of_one, cache.shape[3])
        for state in self._states.values():
            state[[one, other]] = state[[other, one]]

    def row_views(self, row: int, kv_len: int, floor: int = 0) -> list[npt.NDArray[Any]]:
        """See ``Executor.row_views``."""
        caches = self._caches.items()
        entries = [
            cache[row, 0, :, min(self._find_first_readable(name, floor), kv_len) : kv_len] for name, cache in caches
        ]
        return entries + [state[row] for state in self._states.values()]

    def clear_row(self, row: int) -> None:
        """Empty a row's states. Attention reads no entry beyond a row's length."""
        for state in self._states.values():
            state[row] = 0.0

    def move_entries(self, row: int, entries: Int64Array, start: int = 0) -> None:
        """See ``Executor.move_entries``."""
        for memory in self._memory.values():
            memory.array[row, :, :, start : start + len(entries)] = memory.array[row][:, :, entries]
