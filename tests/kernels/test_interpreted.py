"""The kernels, interpreted on the CPU, against the plain reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import chance
from tests.support.cases.chance import examples
from tests.support.cases.kernel_cases import CASES, RAGGED, Case, check, make_step, seen_in_tree
from tests.support.references.kernel_worker import InterpretedKernels, WorkerError

pytestmark = pytest.mark.xdist_group("kernels-interpreted")
SPLIT = ["ragged", "empty_rows", "everything"]


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
    for splits in (2, 4):
        step = make_step(replace(CASES[name], splits=splits))
        parts = kernels.run(step)
        check(step, parts)
        # The weights of a split are rounded relative to its own maximum; the rest is one unit in the last place.
        np.testing.assert_allclose(parts[0], one, atol=1e-3, rtol=2**-10)


@pytest.mark.whole
@examples(30)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), min_size=1, max_size=4), padding=st.integers(0, 9),
    group=st.integers(1, 5), kv_heads=st.integers(1, 2), size=st.sampled_from([8, 16, 24]),
    window=st.sampled_from([-1, -1, 1, 7, 16, 40]), tree=st.booleans(), sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]), splits=st.integers(1, 5),
    tiles=st.sampled_from([(16, 16), (16, 32), (32, 16)]), dtype=st.sampled_from(["float16", "bfloat16"]),
)  # fmt: skip
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


def test_another_dtype_is_a_key_error(kernels: InterpretedKernels) -> None:
    step = make_step(Case(rows=((2, 1),)))
    step.case = replace(step.case, dtype="float32")
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
    # Nodes 0 -> 1 -> 3 and 0 -> 2, after 5 committed entries; worked out by hand.
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


@pytest.mark.whole
@pytest.mark.fuzz
def test_meaningless_lengths_touch_nothing_outside(kernels: InterpretedKernels) -> None:
    """A builder that times kernels feeds them whatever its buffers hold."""
    for seed in range(chance.seed(0), chance.seed(0) + chance.many(24)):
        assert kernels.ask("run_on_meaningless_lengths", seed), f"seed {seed} wrote outside its cache"
