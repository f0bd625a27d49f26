"""The torch op and every lowering of UnpaddedAttention against the plain reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.ops import UNPADDED_ATTENTION
from specexport.ops.reference import unpadded_attention
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError
from tests.support.cases.unpadded_cases import (
    CAPACITY,
    CASES,
    RAGGED,
    Case,
    attributes,
    expect,
    given_names,
    make_inputs,
    one_node_model,
)
from tests.support.references.lowered import lower_ort_cpu
from tests.support.references.sessions import session_of

SLOPES = {
    "slopes": Case(RAGGED, slopes=True),
    "slopes_every_row_full": Case(((45, 3), (45, 3), (0, 3)), slopes=True, kv_heads=4),
    "slopes_and_all_else": Case(RAGGED, k_dim=24, window=5, softcap=2.0, sinks=True, slopes=True),
}
"""ALiBi, which only the CPU computes."""
WHOLE_ROWS = {
    "whole_rows": Case(RAGGED, causal=0),
    "whole_rows_empty": Case(((5, 0), (2, 4), (0, 0), (7, 0)), causal=0),
    "whole_rows_everything": Case(RAGGED, k_dim=24, window=5, softcap=2.0, sinks=True, causal=0),
}
LONG = ((8, 5), (17, 1), (3, 3), (30, 12))
READING = {
    "reading_one_token_rows": Case(((8, 1), (17, 1), (1, 1), (48, 1)), appends=False),
    "reading_ragged": Case(LONG, appends=False),
    "reading_idle": Case(((5, 0), (7, 1), (0, 0), (9, 1)), appends=False),
    "reading_large_head_size": Case(((8, 1), (40, 1)), k_dim=512, v_dim=512, window=7, appends=False),
    "reading_everything": Case(LONG, k_dim=20, v_dim=12, kv_heads=1, slopes=True, softcap=1.5, window=4, appends=False),
}
"""Without keys and values: the caches are another model's."""


def assert_equal(case: Case, found: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> None:
    """Outputs everywhere, caches up to each row's new length."""
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5, rtol=0)
    for cache, expected in zip(found[1:], wanted[1:], strict=True):
        for b, (past, new) in enumerate(case.rows):
            np.testing.assert_array_equal(cache[b, 0, :, : past + new], expected[b, 0, :, : past + new])


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [*CASES, *SLOPES, *READING])
def test_torch_op_equals_reference(name: str) -> None:
    import torch

    import specexport.ops.torch_ops  # noqa: F401

    case = (CASES | SLOPES | READING)[name]
    inputs, given = make_inputs(case), given_names(case)
    tensors = [torch.from_numpy(inputs[i.name]) if i.name in given else None for i in UNPADDED_ATTENTION.inputs]
    found = torch.ops.specexport.unpadded_attention(*tensors, *attributes(case).values())
    assert_equal(case, tuple(x.numpy() for x in found), expect(case, inputs))


def run_in_place(case: Case, inputs: dict[str, np.ndarray], **padded: bool) -> tuple[np.ndarray, ...]:
    """Lower, run with caches bound to their own memory, return output and the caches that were bound."""
    model = one_node_model(case)
    lower_ort_cpu(model, **padded)
    session = session_of(model)
    io = session.io_binding()
    for value in session.get_inputs():
        array = inputs[value.name]
        io.bind_input(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name in ("k_cache", "v_cache") if case.appends else ():
        cache = inputs[name]
        io.bind_output(f"{name}_out", "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
    io.bind_output("output", "cpu")
    session.run_with_iobinding(io)
    return io.get_outputs()[-1].numpy(), inputs["k_cache"], inputs["v_cache"]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [*CASES, *SLOPES, *WHOLE_ROWS])
def test_ort_cpu_lowering_equals_reference_and_writes_in_place(name: str) -> None:
    case = (CASES | SLOPES | WHOLE_ROWS)[name]
    assert_runs_as_the_reference(case, make_inputs(case))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", READING)
def test_attention_over_another_models_caches_equals_reference_and_changes_nothing(name: str) -> None:
    case = READING[name]
    inputs = make_inputs(case)
    before = {cache: inputs[cache].copy() for cache in ("k_cache", "v_cache")}
    found = run_in_place(case, inputs)
    np.testing.assert_allclose(found[0], expect(case, inputs)[0], atol=1e-5, rtol=0)
    for cache, values in before.items():
        np.testing.assert_array_equal(inputs[cache], values)


def assert_runs_as_the_reference(case: Case, inputs: dict[str, np.ndarray], **padded: bool) -> None:
    """Entries beyond a row's own tokens are still poison."""
    wanted = expect(case, inputs, **padded)
    found = run_in_place(case, inputs, **padded)
    assert_equal(case, found, wanted)
    for cache in found[1:]:
        for b, (past, new) in enumerate(case.rows):
            assert np.isnan(cache[b, 0, :, past + new :]).all()


PADDING = ((1, 2), (0, 5, 6, 16), (), tuple(range(18, 29)))
PADDED_CASES = {
    "ragged": Case(RAGGED, PADDING),
    "one_token_rows": Case(((4, 1), (9, 1), (3, 1)), ((0,), (3, 4, 8), ())),
    "empty_rows": Case(((5, 0), (2, 4), (3, 0)), ((2,), (1,), (0, 1, 2))),
    "window": Case(RAGGED, PADDING, window=4),  # padding inside the window must not count
    "everything": Case(RAGGED, PADDING, window=5, softcap=2.0, sinks=True),
    "slopes": Case(RAGGED, PADDING, k_dim=24, slopes=True, window=4),
    "every_row_full": Case(((43, 3), (43, 3), (4, 3)), ((4,), (), (0, 1, 2, 3))),
    "one_length": Case(((43, 3), (43, 3)), ((4, 41, 42), (0, 5)), window=6),
    "long_chunk": Case(((0, 30), (46, 1), (44, 3)), ((), (3,), (41, 42, 43))),
    "values_smaller_everything": Case(RAGGED, PADDING, k_dim=24, v_dim=16, window=4, softcap=1.5, sinks=True),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PADDED_CASES)
def test_padded_kv_lowering_equals_reference_and_writes_in_place(name: str) -> None:
    case = PADDED_CASES[name]
    inputs = make_inputs(case)
    for b, entries in enumerate(case.padding):  # computed once, so they are finite; they would show
        for name in ("k_cache", "v_cache"):
            inputs[name][b, 0, :, list(entries)] = 50.0
    assert_runs_as_the_reference(case, inputs, padded_kv=True)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["ragged", "values_smaller_everything"])
def test_padding_changes_nothing_but_the_entries(name: str) -> None:
    """The reference itself: the same tokens with the padding squeezed out give the same output."""
    case = PADDED_CASES[name]
    inputs = make_inputs(case)
    output = expect(case, inputs, padded_kv=True)[0]
    rows = tuple((past - len(p), new) for (past, new), p in zip(case.rows, case.padding, strict=True))
    squeezed = make_inputs(replace(case, rows=rows, padding=()))
    for cache in ("k_cache", "v_cache"):
        for b, (past, _) in enumerate(case.rows):
            kept = [entry for entry in range(past) if entry not in case.padding[b]]
            squeezed[cache][b, 0, :, : len(kept)] = inputs[cache][b][0, :, kept].swapaxes(0, 1)
    packed = {key: inputs[key] for key in ("q", "k", "v", "sinks") if key in inputs}
    np.testing.assert_allclose(expect(case, squeezed | packed)[0], output, atol=1e-12)


@pytest.mark.parametrize("k_dim", [16, 24])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_is_a_number_and_changes_no_other(k_dim: int, sinks: bool) -> None:
    case = Case(((6, 3), (4, 2)), ((1,), ()), k_dim=k_dim, sinks=sinks)
    inputs = make_inputs(case)
    wanted = expect(case, inputs, padded_kv=True)[0]
    inputs["kv_positions"][1] = -1  # every entry of the second row is padding, its new tokens too
    found = run_in_place(case, inputs, padded_kv=True)[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:3], wanted[:3], atol=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"window": 4}, {"window": 3}), ({"window": 4}, {"window": 5}), ({"causal": 0}, {"causal": 1}),
        ({"scale": 0.3}, {"scale": 0.301}),
    ],
)  # fmt: skip
def test_the_reference_notices_what_differs(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    inputs = make_inputs(Case(RAGGED, slopes=True))
    one, other = (expect(Case(RAGGED, **given), inputs)[0] for given in (right, wrong))
    assert np.abs(one - other).max() > 1e-4
    turned = expect(Case(RAGGED, **right), inputs | {"slopes": -inputs["slopes"]})[0]
    assert np.abs(turned - one).max() > 0.1


def lower_for(backend: str, model: ir.Model) -> None:
    from specexport.lowering.trt_native import replace_attention
    from specexport.lowering.trt_plugin import replace_attention as plug_in
    from tests.support.references.lowered import lower_ort_cuda

    if backend == "ort-cuda":
        lower_ort_cuda(model)
    else:
        (replace_attention if backend == "native" else plug_in)(model, kv_capacity=CAPACITY)


@pytest.mark.parametrize("backend", ["ort-cuda", "native", "plugin"])
def test_slopes_are_refused_where_they_would_be_left_out(backend: str) -> None:
    model = one_node_model(SLOPES["slopes"])
    with pytest.raises(UnsupportedModelError, match="ALiBi slopes"):
        lower_for(backend, model)


def test_a_padded_graph_of_tokens_that_look_ahead_is_refused() -> None:
    with pytest.raises(CheckFailedError, match="causal attention only"):
        lower_ort_cpu(one_node_model(WHOLE_ROWS["whole_rows"]), padded_kv=True)


def test_reference_on_numbers_worked_out_by_hand() -> None:
    # One head of size 1, scale 1: two entries with scores 0 and ln 3 weigh 1/4 and 3/4.
    ones = np.ones((1, 1), np.float32)
    cache_k = np.zeros((1, 1, 1, 4, 1), np.float32)
    cache_v = np.full((1, 1, 1, 4, 1), 8.0, np.float32)
    call = (ones, ones * np.log(3), ones * 4, cache_k, cache_v, np.array([[1]], np.int32), np.array([0, 1], np.int32))
    output, keys, values = unpadded_attention(*call, num_heads=1, kv_num_heads=1, scale=1.0)
    assert output[0, 0] == pytest.approx(0.25 * 8 + 0.75 * 4)
    assert keys[0, 0, 0, :, 0].tolist() == pytest.approx([0, np.log(3), 0, 0])
    assert values[0, 0, 0, :, 0].tolist() == [8, 4, 8, 8]
    # A sink with score ln 4 takes half of the weight and gives nothing.
    sunk, _, _ = unpadded_attention(*call, np.log([4.0]), num_heads=1, kv_num_heads=1, scale=1.0)
    assert sunk[0, 0] == pytest.approx((8 + 3 * 4) / 8)
