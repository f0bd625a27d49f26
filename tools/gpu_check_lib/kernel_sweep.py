"""Section 3, last: other tiles, warps and stages of the attention kernel, for the tuning table (``tile_table``).

Two sets are looked at apart: tiles that a plugin may embed (48 KiB of shared memory at most, because TensorRT's
launcher cannot opt in to more), and larger ones.
"""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from tools.gpu_check_lib import kernel_speed as speed
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.kernels import expected
from tools.gpu_check_lib.needs import require_gpu
from tools.gpu_check_lib.rows import judge, reason_of
from tools.gpu_check_lib.timing import copy_bandwidth, gigabytes_per_second, kv_step_bytes, num_sets, time_rotating

if TYPE_CHECKING:
    from specexport.kernels.spec import KernelSpec
    from specexport.kernels.tuning import TileConfig

SMALL_BYTES = 48 * 1024
BLOCKS, STAGES, WARPS = (64, 32, 128, 16), (3, 2, 4), (4, 8, 2)
FIRST_PAST = 8192
"""All candidates are timed behind so many entries; the best of them behind the others of ``kernel_speed.PASTS``."""
KEPT = 3


class Timed(NamedTuple):
    """A candidate: its tiles, the splits that fit them, and milliseconds of a step."""

    tiles: "TileConfig"
    splits: int
    milliseconds: float


def sweep(context: Context) -> None:
    """The best tiles of both sets, at every length."""
    import torch

    require_gpu()
    gpu = torch.cuda.get_device_properties(0)
    sm = 10 * gpu.major + gpu.minor
    found: dict[bool, list[Timed]] = {True: [], False: []}
    pasts = (FIRST_PAST, *(past for past in speed.PASTS if past != FIRST_PAST))
    for past in pasts:
        what = f"tiles, {past} past"
        if not context.has_time(what, 10):
            return
        with context.part(what):
            _sweep_past(context, what, past, sm, found, is_first=past == FIRST_PAST)
        torch.cuda.empty_cache()


def candidates(sm: int, *, small: bool) -> "Iterator[TileConfig]":
    """Tiles to try: the table's own first, then its neighbours, the likeliest first."""
    own = _spec().tiles(sm, small=small)
    yield own
    for stages, warps, block in product(STAGES, WARPS, BLOCKS):
        tiles = own._replace(block_n=block, num_warps=warps, num_stages=stages)
        if tiles != own:
            yield tiles


def fits(tiles: "TileConfig", sm: int, *, small: bool) -> bool:
    """Whether a candidate can be launched in its set, by what the compiler says; one that spills registers is out."""
    from specexport.kernels.compile import compile_kernel
    from specexport_runtime.errors import CheckFailedError

    try:
        kernel = compile_kernel(_spec(splits=2), sm, tiles=tiles)
    except CheckFailedError:  # more shared memory than there is
        return False
    return kernel.spill_bytes == 0 and (kernel.shared_bytes <= SMALL_BYTES) == small


def _spec(splits: int = 1) -> "KernelSpec":
    from specexport.kernels.spec import KernelSpec

    return KernelSpec(
        kernel="ragged_attention", dtype="bfloat16", num_heads=speed.HEADS, kv_num_heads=speed.KV_HEADS,
        head_size=speed.HEAD_SIZE, new_tokens=speed.NEW_TOKENS, num_splits=splits,
    )  # fmt: skip


def _splits_of(tiles: "TileConfig", past: int, multiprocessors: int) -> int:
    from specexport.kernels.tuning import choose_splits

    tiles_of_row = -(-speed.NEW_TOKENS * (speed.HEADS // speed.KV_HEADS) // tiles.block_m)
    return choose_splits(speed.NUM_SEQS * speed.KV_HEADS * tiles_of_row, past, tiles.block_n, multiprocessors)


def _sweep_past(
    context: Context, what: str, past: int, sm: int, found: dict[bool, list[Timed]], *, is_first: bool
) -> None:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    cache_bytes = int(getattr(gpu, "L2_cache_size", 0)) or 64 * 2**20
    num_bytes = kv_step_bytes(speed.NUM_SEQS, speed.KV_HEADS, past + speed.NEW_TOKENS, speed.HEAD_SIZE, 2)
    sets = [speed.filled(speed.case_of(past)) for _ in range(num_sets(num_bytes, cache_bytes))]
    right = expected(speed.case_of(past), sets[0]["q"], sets[0]["k_cache"], sets[0]["v_cache"], speed.HEAD_SIZE**-0.5)
    copied = copy_bandwidth(num_bytes, cache_bytes)
    for small, name in ((True, "48 KiB at most"), (False, "larger")):
        timed: list[Timed] = []
        own = _spec().tiles(sm, small=small)
        tried = candidates(sm, small=small) if is_first else _finalists(found[small], own)
        # Half of the time for each set of the first length, and what the later ones need stays.
        until = context.left * (0.65 if small else 0.4) if is_first else 4.0
        for tiles in tried:
            if context.left < until:
                break
            if is_first and not fits(tiles, sm, small=small):
                continue
            splits = _splits_of(tiles, past, gpu.multi_processor_count)
            calls = [speed.call(tensors, splits, tiles) for tensors in sets]
            try:
                speed.require_right(calls[0](), right)
                timed.append(Timed(tiles, splits, time_rotating(calls)[0]))
            except Exception as error:  # the others may do
                context.recorder.row(f"{what}, {name}: {_cut(tiles)}", reason_of(error), is_detail=True)
        if not timed:
            context.recorder.row(f"{what}, {name}", "skipped: none fits, or no time was left", verdict="skipped")
            continue
        ranked = sorted(timed, key=lambda item: item.milliseconds)
        if is_first:
            found[small] = ranked
        best = ranked[0]
        share = gigabytes_per_second(num_bytes, best.milliseconds) / copied
        table = "".join(f"; the table's {1e3 * item.milliseconds:.1f} us" for item in timed if item.tiles == own)
        context.recorder.row(
            f"{what}, {name}: best of {len(timed)}",
            f"{_describe(best)}; {share:.0%} of the copy bandwidth{table}",
            target=f"at least {speed.COPY_TARGET:.0%}", verdict=judge(share, at_least=speed.COPY_TARGET),
            tiles=best.tiles._asdict(), splits=best.splits, milliseconds=best.milliseconds, share=share,
        )  # fmt: skip
        context.recorder.row(
            f"{what}, {name}: all", "; ".join(map(_describe, ranked)), is_detail=True,
            gpu=gpu.name, sm=sm, head_size=speed.HEAD_SIZE, past=past, small=small, own=own._asdict(),
            ranked=[{"tiles": item.tiles._asdict(), "milliseconds": item.milliseconds} for item in ranked],
        )  # fmt: skip


def _finalists(ranked: list[Timed], own: "TileConfig") -> "Iterator[TileConfig]":
    """The best of the first length, and the table's own tiles if they were tried there."""
    best = [item.tiles for item in ranked[:KEPT]]
    yield from best
    if own not in best and own in [item.tiles for item in ranked]:
        yield own


def _cut(tiles: "TileConfig") -> str:
    return f"{tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def _describe(item: Timed) -> str:
    return f"{_cut(item.tiles)}, {item.splits} splits: {1e3 * item.milliseconds:.1f} us"
