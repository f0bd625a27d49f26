"""Tile sizes, warps, pipeline stages and split counts, chosen so that two programs fit a multiprocessor."""

from typing import NamedTuple

from specexport.kernels.measured import MEASURED
from specexport_runtime.errors import UserInputError

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}
"""Multiprocessors of the usual GPU of each architecture (A100, RTX 4090, H100/H200, B200, RTX 5090)."""

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Most shared memory one program may use, by architecture [CUDA C++ Programming Guide, compute capabilities]."""

# (entries in a block, pipeline stages) by padded head size; loads run ahead by up to one stage less.
_ENTRIES = {
    80: {16: (64, 3), 32: (64, 3), 64: (64, 3), 128: (64, 2), 256: (32, 2)},
    89: {16: (64, 3), 32: (64, 3), 64: (64, 2), 128: (32, 3), 256: (32, 2)},
    90: {16: (128, 3), 32: (128, 3), 64: (64, 4), 128: (64, 3), 256: (32, 3)},
}
_ENTRIES |= {100: _ENTRIES[90], 120: _ENTRIES[89]}
_SMALL_ENTRIES = {16: (64, 3), 32: (64, 3), 64: (64, 2), 128: (32, 3), 256: (16, 2)}
_CHUNK_QUERIES = 128  # of a tile of a prefill chunk; more entries a block than these would not fit the registers
_CHUNK_ENTRIES = {80: 32, 89: 32, 90: 64, 100: 64, 120: 32}

MAX_SPLITS = 32
"""Most parts a row's entries are split into."""


class TileConfig(NamedTuple):
    """How a kernel is cut up."""

    block_m: int  # queries (tokens times heads of a group) in a tile; tokens in a block of ``kv_append``
    block_n: int  # cache entries loaded at a time
    num_warps: int  # warps of a program
    num_stages: int  # blocks in flight


def next_power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def check_sm(sm: int) -> None:
    """Refuse an architecture the kernels are not tuned for: UserInputError lists the known ones."""
    if sm not in MULTIPROCESSORS:
        known = ", ".join(map(str, MULTIPROCESSORS))
        raise UserInputError(f"The attention kernels know no architecture sm {sm}.", hint=f"Use one of {known}.")


def attention_tiles(sm: int, head_size: int, queries: int, *, small: bool = False) -> TileConfig:
    """Tiles of ``ragged_attention``; UserInputError for an unknown architecture ``sm``.

    ``queries`` are the most new tokens of a row times the query heads of a KV head. ``small`` tiles use at most 48 KiB.
    """
    check_sm(sm)
    block_d = max(next_power_of_two(head_size), 16)
    block_n, num_stages = (_SMALL_ENTRIES if small else _ENTRIES[sm])[block_d]
    most = (32 if small else _CHUNK_QUERIES) * 128 // max(block_d, 128)
    block_m = min(max(next_power_of_two(queries), 16), most)
    if measured := MEASURED.get((sm, block_d, block_m, small)):
        return TileConfig(block_m, *measured)
    if block_m == _CHUNK_QUERIES:
        block_n = min(block_n, _CHUNK_ENTRIES[sm])
    num_warps = 8 if block_m * max(block_d, 128) >= 128 * 128 else 4
    return TileConfig(block_m, block_n, num_warps, num_stages)


def append_tiles(head_size: int) -> TileConfig:
    """Tiles of ``kv_append``: sixteen bytes a thread for a key of two bytes an element."""
    return TileConfig(max(1024 // max(next_power_of_two(head_size), 16), 1), block_n=1, num_warps=4, num_stages=1)


def combine_tiles() -> TileConfig:
    """Tiles of ``combine_splits``: a program takes one head of one token."""
    return TileConfig(1, block_n=1, num_warps=1, num_stages=1)


def choose_splits(programs: int, kv_len: int, block_n: int, multiprocessors: int) -> int:
    """The fewest parts of the entries that reach 90 % of the best occupancy of the last wave.

    Each has at least four blocks of ``block_n`` entries. ``programs`` are tiles times KV heads without splitting.
    """
    slots = 2 * multiprocessors
    most = max(1, min(MAX_SPLITS, kv_len // (4 * block_n)))

    def compute_occupancy(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return programs * splits / (waves * slots)

    best = max(map(compute_occupancy, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if compute_occupancy(splits) >= 0.9 * best)
