"""How much memory this process has."""

import ctypes
import os

import numpy as np
import pytest

from specexport_runtime.abi import LayerGeometry
from specexport_runtime.executors.ort_arena import CAN_GIVE_BACK, ArenaRows

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
needs_linux = pytest.mark.skipif(not CAN_GIVE_BACK, reason="memory goes back page by page on Linux only")


def process_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def resident_bytes(arena):
    mincore, total = ctypes.CDLL(None).mincore, 0
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    for memory in arena._memory.values():
        pages = ctypes.create_string_buffer(-(-len(memory.mapping) // PAGE))
        assert mincore(memory.array.ctypes.data, len(memory.mapping), pages) == 0
        total += sum(byte & 1 for byte in pages.raw[:-1] if byte) * PAGE
    return total


LAYERS = [LayerGeometry(2, 64, 64), LayerGeometry(1, 64, 96)]


class Arena(ArenaRows):
    prepare = execute = close = None

    def __init__(self, rows=4, capacity=100, gives_back=True, layers=LAYERS, dtype=np.float32):
        self.num_rows, self.kv_capacity, self.gives_back = rows, capacity, gives_back and CAN_GIVE_BACK
        self.make_arena(layers, dtype)

    def fill(self, row, count, value=None):
        for i, cache in enumerate(self._caches.values()):
            cache[row, :, :, :count] = row + 1 + i / 8 if value is None else value

    def holds(self, row, count, value):
        return all(
            (cache[row, :, :, :count] == value + 1 + i / 8).all() for i, cache in enumerate(self._caches.values())
        )
