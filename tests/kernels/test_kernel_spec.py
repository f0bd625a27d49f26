"""Grids, tiles, splits and the argument table: nothing here needs Triton."""

from dataclasses import replace

import numpy as np
import pytest

from specexport.kernels import tuning
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import MULTIPROCESSORS, TileConfig, attention_tiles, choose_splits
from specexport_runtime.errors import UserInputError
from tests.support.cases import chance
from tests.support.cases.imports import HEAVY, loaded_after

SPEC = KernelSpec(kernel="ragged_attention", dtype="float16", num_heads=6, kv_num_heads=2, head_size=64)
TILES = TileConfig(16, 32, 4, 2)


@pytest.mark.fuzz
def test_every_tile_of_every_row_has_its_own_program() -> None:
    """The arithmetic of ``find_tile``, in Python, against counting: programs of rows do not overlap, and all exist."""
    random = np.random.default_rng(chance.seed(0))
    for _ in range(chance.many(200)):
        group, block = int(random.integers(1, 9)), int(random.choice([16, 32, 128]))
        counts = random.integers(0, random.choice([2, 7, 200]), size=random.integers(1, 9))
        padding = int(random.integers(0, 50))
        spec = replace(SPEC, num_heads=2 * group)
        programs = spec.grid(TileConfig(block, 16, 4, 1), int(counts.sum()) + padding, len(counts))[0]
        free = 0
        ends = np.concatenate([[0], np.cumsum([*counts, padding])])
        for row, count in enumerate([*counts, padding]):
            first = ends[row] * group // block + row
            assert first >= free
            free = first - (-count * group // block)
        assert free <= programs


def test_optional_tensors_are_arguments_only_where_they_are_used() -> None:
    names = SPEC.signature.argument_names
    base = ("q", "k_cache", "v_cache", "kv_lens", "cu_new_tokens")
    ints = ("num_tokens", "num_seqs", "kv_capacity")
    assert names == (*base, *ints, "output")
    everything = replace(SPEC, tree=True, sinks=True, num_splits=2).signature
    assert everything.argument_names == (*base, "tree_mask", "sinks", *ints, "partial_acc", "partial_stats")
    assert everything.ptx_types() == ("u64",) * 7 + ("u32",) * 3 + ("u64",) * 2


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"dtype": ""}, {"kernel": "attention"}])
def test_another_dtype_or_kernel_is_a_key_error(change: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 5}, "5 query heads cannot share 2 KV heads"), ({"kv_num_heads": 0}, "0 KV heads"),
        ({"head_size": 257}, "Head size 257"), ({"v_head_size": -1}, "Head size -1"), ({"num_splits": 0}, "0 splits"),
        ({"num_splits": 33}, "33 splits"), ({"window": 0}, "window of 0"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_refused_by_name(change: dict[str, int], named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        replace(SPEC, **change)


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(UserInputError, match=r"sm 75.*80, 89, 90, 100, 120"):
        SPEC.tiles(75)


@pytest.mark.parametrize("sm", MULTIPROCESSORS)
@pytest.mark.parametrize("head_size", [1, 64, 80, 128, 256])
def test_a_tile_holds_the_queries_of_a_verify_step_of_one_row(sm: int, head_size: int) -> None:
    assert attention_tiles(sm, head_size, 1).block_m == 16
    assert attention_tiles(sm, head_size, 20).block_m == 32
    assert attention_tiles(sm, head_size, 10_000).block_m <= 128


def test_measured_tiles_come_before_chosen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {(90, 128, 32, True): (32, 8, 2), (90, 128, 32, False): (128, 8, 2)}
    monkeypatch.setattr(tuning, "MEASURED", measured)
    assert attention_tiles(90, 128, 20, small=True) == TileConfig(32, 32, 8, 2)
    assert attention_tiles(90, 128, 20) == TileConfig(32, 128, 8, 2)
    assert attention_tiles(80, 128, 20) == TileConfig(32, 64, 4, 2), "another architecture"


def test_splits_fill_the_gpu_and_no_more() -> None:
    # Eight rows on eight KV heads are 64 programs; two on each of 132 multiprocessors are 264.
    assert choose_splits(64, 16_384, 64, 132) == 4
    assert choose_splits(264, 16_384, 64, 132) == 1
    assert choose_splits(8, 16_384, 64, 132) == 29  # 32, the most, would fill the GPU by a tenth more at best
    assert choose_splits(64, 300, 64, 132) == 1  # too short to be worth it
    assert choose_splits(1, 100_000, 64, 132) == 29


def test_splits_are_chosen_from_the_step() -> None:
    spec = replace(SPEC, num_heads=32, kv_num_heads=8, head_size=128, new_tokens=5)
    assert spec.with_splits(90, num_seqs=8, kv_len=16_384).num_splits == 4
    assert spec.with_splits(90, num_seqs=64, kv_len=16_384).num_splits == 1
    assert spec.with_splits(90, num_seqs=8, kv_len=16_384, multiprocessors=32).num_splits == 1
    assert replace(spec, window=256).with_splits(90, num_seqs=8, kv_len=16_384).num_splits == 1
    # One row of a prefill chunk has tiles enough by itself; as many splits come out whichever kernel asks.
    assert replace(spec, new_tokens=2048).with_splits(90, num_seqs=1, kv_len=16_384).num_splits == 1
    assert replace(spec, kernel="combine_splits").with_splits(90, num_seqs=8, kv_len=16_384).num_splits == 4


def test_what_describes_a_kernel_or_a_plugin_imports_nothing_heavy() -> None:
    modules = ("kernels.spec", "kernels.compile", "kernels.report", "plugin.definitions", "plugin.naming")
    loaded, _ = loaded_after("\n".join(f"import specexport.{name}" for name in modules))
    assert not loaded & HEAVY
