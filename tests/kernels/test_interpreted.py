"""The kernels, interpreted on the CPU, against the plain reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases.chance import examples
from tests.support.cases.kernel_cases import TOLERANCE, Case, Step, expected, make_step, seen_in_tree
from tests.support.references.kernel_worker import InterpretedKernels, WorkerError

pytestmark = pytest.mark.xdist_group("kernels-interpreted")

RAGGED = ((3, 5), (17, 1), (0, 3), (37, 12), (16, 2))
CASES = {
    "ragged": Case(rows=RAGGED),
    "bfloat16": Case(rows=RAGGED, dtype="bfloat16"),
    "permuted_rows": Case(rows=tuple(reversed(RAGGED))),
    "one_token_rows": Case(rows=((4, 1), (90, 1), (0, 1))),
    "one_row_one_token": Case(rows=((0, 1),), padding=0),
    "prefill": Case(rows=((0, 41), (5, 30)), padding=0),
    "empty_rows": Case(rows=((5, 0), (2, 4), (0, 0), (70, 0), (33, 1), (9, 0))),
    "all_rows_empty": Case(rows=((5, 0), (0, 0)), padding=20),
    "much_padding": Case(rows=RAGGED, padding=70),
    "more_rows_than_a_search_block": Case(
        rows=tuple((b % 7, b % 5 % 2) for b in range(70)), heads=2, kv_heads=1, capacity=16
    ),
    "full_rows": Case(rows=((91, 5), (0, 96), (96, 0))),
    "heads_1_to_1": Case(rows=RAGGED, heads=2, kv_heads=2),
    "heads_3_to_1": Case(rows=RAGGED, heads=6, kv_heads=2),
    "heads_7_to_1": Case(rows=RAGGED, heads=14, kv_heads=2),
    "heads_16_to_1": Case(rows=RAGGED, heads=16, kv_heads=1),
    "heads_20_to_1": Case(rows=RAGGED, heads=20, kv_heads=1),
    "head_size_64": Case(rows=RAGGED, k_dim=64, v_dim=64, scale=0.125),
    "head_size_80": Case(rows=RAGGED, k_dim=80, v_dim=80, scale=0.11),
    "head_size_96": Case(rows=RAGGED, k_dim=96, v_dim=96, scale=0.1, dtype="bfloat16"),
    "head_size_128": Case(rows=RAGGED, k_dim=128, v_dim=128, scale=0.09, dtype="bfloat16"),
    "head_size_256": Case(rows=RAGGED, k_dim=256, v_dim=256, scale=0.06),
    "head_size_5": Case(rows=RAGGED, k_dim=5, v_dim=5),
    "values_smaller": Case(rows=RAGGED, k_dim=24, v_dim=16),
    "values_larger": Case(rows=RAGGED, k_dim=8, v_dim=40),
    "window": Case(rows=RAGGED, window=4),
    "window_of_one": Case(rows=RAGGED, window=1),
    "window_of_a_block": Case(rows=RAGGED, window=16),
    "window_of_blocks": Case(rows=RAGGED, window=37),
    "window_wider_than_rows": Case(rows=RAGGED, window=500),
    "softcap": Case(rows=RAGGED, softcap=1.5),
    "softcap_saturated": Case(rows=RAGGED, softcap=0.01, scale=40.0),
    "sinks": Case(rows=RAGGED, sinks=True),
    "tree": Case(rows=RAGGED, tree=True),
    "tree_of_64": Case(rows=((20, 64), (0, 64), (30, 1)), tree=True),
    "tree_beside_causal_rows": Case(rows=((20, 9), (0, 70), (30, 5)), tree=True, causal_rows=(1,)),
    "tree_window": Case(rows=RAGGED, tree=True, window=3),
    "tree_window_reaching_back": Case(rows=((20, 64), (0, 30), (41, 9)), tree=True, window=9, causal_rows=(2,)),
    "everything": Case(rows=RAGGED, window=21, softcap=2.0, sinks=True, tree=True, heads=6, k_dim=24, v_dim=20),
    "everything_bfloat16": Case(rows=RAGGED, window=21, softcap=2.0, sinks=True, tree=True, dtype="bfloat16"),
    "tiles_as_shipped": Case(rows=RAGGED, k_dim=64, v_dim=64, scale=0.125, tiles=None),
}

SPLIT = ["ragged", "empty_rows", "head_size_80", "window", "sinks", "everything"]


def check(step: Step, found: tuple[np.ndarray, ...]) -> None:
    """Output of real tokens close, of padding tokens zero; the caches equal bit by bit, NaN where nothing belongs."""
    wanted = expected(step)
    used = len(wanted[0])
    tolerance = TOLERANCE[step.case.dtype]
    np.testing.assert_allclose(found[0][:used], wanted[0], atol=tolerance, rtol=tolerance)
    assert not found[0][used:].any()
    for cache, written in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(cache, written)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_reference(name: str, kernels: InterpretedKernels) -> None:
    step = make_step(CASES[name])
    check(step, kernels.run(step))


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize("name", SPLIT)
def test_any_number_of_splits_gives_the_same(name: str, kernels: InterpretedKernels) -> None:
    one = kernels.run(make_step(CASES[name]))[0]
    for splits in (2, 3, 4):
        step = make_step(replace(CASES[name], splits=splits))
        parts = kernels.run(step)
        check(step, parts)
        # The weights of a split are rounded relative to its own maximum; the rest is one unit in the last place.
        np.testing.assert_allclose(parts[0], one, atol=1e-3, rtol=2**-10)


@pytest.mark.whole
@examples(30)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), min_size=1, max_size=4),
    padding=st.integers(0, 9),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    size=st.sampled_from([8, 16, 24]),
    window=st.sampled_from([-1, -1, 1, 7, 16, 40]),
    tree=st.booleans(),
    sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
    splits=st.integers(1, 5),
    tiles=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
def test_any_shape_equals_reference(kernels, rows, padding, group, kv_heads, size, **rest) -> None:
    heads = {"heads": group * kv_heads, "kv_heads": kv_heads}
    padding += not any(count for _, count in rows)  # a step has a token
    step = make_step(Case(rows=tuple(rows), padding=padding, k_dim=size, v_dim=size, **heads, **rest))
    check(step, kernels.run(step))


def test_rows_without_room_are_not_written_beyond_their_end(kernels: InterpretedKernels) -> None:
    step = make_step(Case(rows=((15, 3), (4, 1)), capacity=16))  # room for one entry, three tokens
    output, *caches = kernels.run(step)
    assert np.isfinite(output).all()
    for name, cache in zip(("k", "v"), caches, strict=True):
        before, tokens = step.arrays[f"{name}_cache"], step.arrays[name].reshape(-1, 2, 16)
        before[0, 0, :, 15], before[1, 0, :, 4] = tokens[0], tokens[3]
        np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_another_dtype_is_a_key_error(dtype: str, kernels: InterpretedKernels) -> None:
    step = make_step(Case(rows=((2, 1),)))
    step.case = replace(step.case, dtype=dtype)
    for array in step.arrays.values():
        np.nan_to_num(array, copy=False)
    with pytest.raises(WorkerError) as error:
        kernels.run(step)
    assert error.value.kind == "KeyError"


def test_tensors_that_do_not_fit_are_refused_by_name(kernels: InterpretedKernels) -> None:
    step = make_step(Case(rows=((2, 1), (3, 2))))
    step.arrays["v_cache"] = step.arrays["v_cache"][:1]
    with pytest.raises(WorkerError, match=r"kv_append got v_cache .* Fix: Pass a contiguous \[B=2"):
        kernels.run(step)


def test_the_window_of_a_tree_counts_along_its_path() -> None:
    # Nodes 0 -> 1 -> 3 and 0 -> 2, behind 5 committed entries; worked out by hand.
    assert seen_in_tree(0b1011, 3, 5, -1) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert seen_in_tree(0b1011, 3, 5, 4) == [4, 5, 6, 8]
    assert seen_in_tree(0b0101, 2, 5, 3) == [4, 5, 7]
    assert seen_in_tree(0, 2, 5, 3) == [5, 6, 7]


def test_a_tree_that_is_a_chain_is_causal(kernels: InterpretedKernels) -> None:
    case = Case(rows=RAGGED, tree=True)
    step = make_step(case)
    step.arrays["tree_mask"] = np.array([(2 << j) - 1 for _, n in RAGGED for j in range(n)] + [0] * 3, np.int64)
    causal = kernels.run(make_step(replace(case, tree=False)))[0]
    np.testing.assert_array_equal(kernels.run(step)[0], causal)
