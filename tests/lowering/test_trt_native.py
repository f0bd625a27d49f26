"""The native TensorRT lowering, evaluated by numpy operators as strict as NVIDIA's documentation of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from specexport.lowering import trt_native
from specexport.lowering.common import add_token_ids
from specexport_runtime.errors import UnsupportedModelError
from tests.support.cases.unpadded_cases import CAPACITY, CASES, Case, expect, make_inputs, one_node_model
from tests.support.models.half_models import trace
from tests.support.references.trt_evaluator import align, make_evaluator

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# float32: rounding of sums. Halves: q is rounded once after scaling and the result once, weights once where explicit;
# values reach about 3, so this is a few units in the last place.
TOLERANCE = {"float32": 1e-5, "float16": 6e-3, "bfloat16": 5e-2}
FORMS = {
    "ragged": "fused-causal", "multi_query": "fused-causal", "large_head_size": "fused-causal",
    "window": "fused-masked", "window_of_one": "fused-masked", "softcap": "explicit", "sinks": "explicit",
    "everything": "explicit", "odd_head_size": "explicit", "values_smaller": "explicit",
}  # fmt: skip


@pytest.fixture
def fused_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forms in float32 too: no GPU has them, but their masks can be compared to the last digit."""
    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT", "FLOAT16", "BFLOAT16"))


def lower(case: Case, dtype: str = "float32", capacity: int = CAPACITY) -> tuple[ir.Model, str]:
    model = one_node_model(case, dtype)
    (form,) = trt_native.replace_attention(model, kv_capacity=capacity)
    return model, form


def run(model, inputs, step, dtype="float32"):
    named = {value.name for value in model.graph.inputs}
    feeds = inputs | step
    for name in ("k_cache", "v_cache"):
        feeds[name] = feeds[name][:, 0]
    floats = {name for name, array in feeds.items() if array.dtype == np.float32}
    feeds = {name: array.astype(DTYPES[dtype]) if name in floats else array for name, array in feeds.items()}
    evaluator = make_evaluator(model, ("float32", "float16", "bfloat16"))
    with np.errstate(all="ignore"):
        output, keys, values, *_ = evaluator.run(None, {name: feeds[name] for name in named if name in feeds})
    return output.astype(np.float64), keys[:, None].astype(np.float64), values[:, None].astype(np.float64)


def rounded(inputs: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """What the engine is given, in float32: the reference shall see the same numbers."""
    return {
        name: array.astype(DTYPES[dtype]).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in inputs.items()
    }


def poison_of(case: Case, dtype: str) -> float:
    """Unused entries are NaN, or absurdly large where a mask hides them: they must be finite there."""
    return np.nan if lower(case, dtype)[1] == "fused-causal" else 3e4


def check(case: Case, dtype: str, *, width: int = 0) -> str:
    inputs = rounded(make_inputs(case, poison_of(case, dtype)), dtype)
    wanted = expect(case, inputs)
    model, form = lower(case, dtype)
    step = align(*zip(*case.rows, strict=True), width=width)  # type: ignore[misc]
    output, *caches = run(model, inputs, step, dtype)
    np.testing.assert_allclose(output, wanted[0], atol=TOLERANCE[dtype], rtol=0)
    for cache, expected, before in zip(caches, wanted[1:], (inputs["k_cache"], inputs["v_cache"]), strict=True):
        for b, (past, new) in enumerate(case.rows):
            np.testing.assert_array_equal(cache[b, 0, :, : past + new], expected[b, 0, :, : past + new])
            np.testing.assert_array_equal(cache[b, 0, :, past + new :], before[b, 0, :, past + new :])
    return form


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_equals_the_reference(name: str, dtype: str) -> None:
    form = check(CASES[name], dtype)
    if dtype == "float32":
        assert form == "explicit"
    elif name in FORMS:
        assert form == FORMS[name]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("fused_float32")
def test_fused_forms_see_exactly_the_right_entries(name: str) -> None:
    case = CASES[name]
    assert check(case, "float32") == FORMS.get(name, check(case, "float16"))


@pytest.mark.fuzz
@pytest.mark.parametrize("fold", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("fused_float32")
def test_folded_tokens_see_what_each_would_see_alone(name, dtype, fold, monkeypatch):
    case = CASES[name]
    fused = lower(case, dtype)[1] != "explicit"
    monkeypatch.setattr(trt_native, "replace_attention", partial(trt_native.replace_attention, fold=fold))
    width = -(-max(new for _, new in case.rows) // fold) * fold
    form = check(case, dtype, width=width)
    assert form == ("folded" if fused else "explicit")
    if fused:
        check(case, dtype, width=width + 2 * fold)
        model, _ = lower(case, dtype)
        (node,) = (node for node in model.graph if node.op_type == "TRT_Attention")
        assert node.attributes.get("causal_kind") is None
        assert node.inputs[0] in model.graph.outputs
        assert (node.inputs[0].name, node.inputs[0].shape[1]) == ("query.0", case.heads * fold)


@pytest.mark.parametrize(("window", "kinds"), [(-1, 1), (6, 2)])
def test_masks_of_folded_layers_are_counted_before_they_are_made(window: int, kinds: int) -> None:
    model = trace(*(("gemma3", "bfloat16") if window > 0 else ("llama", "float16"))).ir_model.clone()
    heads = {node.attributes["num_heads"].as_int() for node in model.graph if node.op_type == "UnpaddedAttention"}
    assert trt_native.count_mask_heads(model, fold=5) == kinds * heads.pop()
    trt_native.replace_attention(model, kv_capacity=CAPACITY, fold=5)
    assert len({id(node.inputs[3]) for node in model.graph if node.op_type == "TRT_Attention"}) == kinds


@pytest.mark.parametrize("name", ["ragged", "window", "everything"])
def test_no_size_of_the_step_is_read_from_the_host(name: str) -> None:
    """TensorRT copies a tensor's shape from the host to the GPU, in every step, where numbers are computed from it."""
    assert not {node.op_type for node in lower(CASES[name], "float16")[0].graph} & {"Shape", "Size", "Range"}


def test_steps_share_one_mask_a_window_and_no_mask_where_none_is_needed() -> None:
    def masks(case: Case, dtype: str) -> int:
        return sum(node.op_type == "LessOrEqual" for node in lower(case, dtype)[0].graph)

    assert masks(CASES["ragged"], "float16") == 0
    assert masks(CASES["window"], "float16") == 1
    assert masks(CASES["softcap"], "float16") == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["everything", "values_smaller"])
def test_explicit_matmuls_run_in_the_models_dtype_and_softmax_in_float32(name: str, dtype: str) -> None:
    model, form = lower(CASES[name], dtype)
    assert form == "explicit"
    kinds = {
        op: {node.inputs[0].dtype for node in model.graph if node.op_type == op} for op in ("MatMul", "Exp", "Softmax")
    }
    assert kinds["MatMul"] == {ir.DataType[dtype.upper()]}
    assert kinds["Exp"] | kinds["Softmax"] == {ir.DataType.FLOAT}


def test_no_cache_is_transposed_or_copied() -> None:
    """The matmuls read the updated caches as they lie: TensorRT writes a copy of what is transposed for one."""
    model, _ = lower(CASES["everything"], "float16")
    updated = [node.outputs[0] for node in model.graph if node.op_type == "TRT_KVCacheUpdate"]
    readers = [use.node.op_type for value in updated for use in value.uses()]
    assert readers == ["MatMul", "MatMul"]


def test_keys_and_values_are_not_repeated_for_the_heads_of_a_group() -> None:
    model, _ = lower(replace(CASES["sinks"], heads=8, kv_heads=1), "float16")
    assert not {node.op_type for node in model.graph} & {"Expand", "Tile", "Concat"}


def test_the_scale_is_rounded_once() -> None:
    """scale*q in half precision with a rounded scale is off by up to one more unit in the last place."""
    case = replace(CASES["ragged"], scale=96**-0.5)
    model, _ = lower(case, "float16")
    mul = next(node for node in model.graph if node.op_type == "Mul")
    assert {value.dtype for value in mul.inputs} == {ir.DataType.FLOAT}
    assert float(mul.inputs[1].const_value.numpy()) == np.float32(96**-0.5)


def test_caches_are_network_inputs_with_a_fixed_capacity() -> None:
    model, _ = lower(CASES["values_smaller"], "float16", capacity=40)
    for node in model.graph:
        if node.op_type == "TRT_KVCacheUpdate":
            cache, out = node.inputs[0], node.outputs[0]
            assert cache in model.graph.inputs
            assert out in model.graph.outputs
            assert out.name == f"{cache.name}_out"
            assert list(cache.shape)[1:] == list(out.shape)[1:] == [2, 40, 24 if cache.name == "k_cache" else 16]


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    model = one_node_model(CASES["ragged"], "float64")
    with pytest.raises(UnsupportedModelError, match="attention layer 0 is DOUBLE"):
        trt_native.replace_attention(model, kv_capacity=CAPACITY)
    with pytest.raises(UnsupportedModelError, match="attention layer 0 has 4 query heads on 3"):
        lower(replace(CASES["ragged"], kv_heads=3))


def greedy_ids(rows: Sequence[Sequence[float]]) -> list[int]:
    logits = ir.Value(name="logits", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["R", len(rows[0])]))
    scores = ir.Value(name="scores", type=logits.type, shape=logits.shape)
    node = ir.node("Identity", [scores], outputs=[logits])
    model = ir.Model(ir.Graph([scores], [logits], nodes=[node], opset_imports={"": 23}), ir_version=10)
    add_token_ids(model)
    assert [value.name for value in model.graph.outputs] == ["logits", "token_ids"]
    assert (model.graph.outputs[1].dtype, list(model.graph.outputs[1].shape)) == (ir.DataType.INT64, ["R"])
    with np.errstate(all="ignore"):
        ids = make_evaluator(model).run(["token_ids"], {"scores": np.array(rows, np.float32)})[0]
    assert ids.dtype == np.int64
    return list(ids)


def test_token_ids_are_the_argmax_and_no_nan_hides() -> None:
    inf, nan = np.inf, np.nan
    rows = [[1, 5, 2], [-9, -8, -7], [0, 0, -1e30], [3e4, -3e4, 0]]
    assert greedy_ids(rows) == [1, 2, 0, 0]
    broken = [[1, nan, 2], [nan, 1, 2], [1, 2, nan], [inf, 1, 2], [1, -inf, 2], [inf, -inf, 1], [nan, nan, nan]]
    assert greedy_ids(broken) == [-1] * len(broken)
