"""The plugin lowering for TensorRT: its graphs, evaluated with the plugin's ops in numpy or as interpreted kernels."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from specexport.backends.profiles import input_shapes, plan_profiles
from specexport.lowering import trt_plugin
from specexport.lowering.common import step_inputs
from specexport.passes.contract_check import find_lowered_problems
from specexport.plugin.naming import plugin_names, plugin_spec
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.errors import UnsupportedModelError
from tests.support.cases.unpadded_cases import CAPACITY, CASES, Case, expect, make_inputs, one_node_model
from tests.support.models.half_models import trace
from tests.support.references.evaluator import OPS, make_evaluator
from tests.support.references.kernel_worker import InterpretedKernels
from tests.support.references.lowered import lower_tensorrt

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# The result is rounded once, to the model's type; values reach about 3.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}


def lower(case: Case, dtype: str = "float16", splits: int | None = None, capacity: int = CAPACITY) -> ir.Model:
    model = one_node_model(case, dtype)
    trt_plugin.replace_attention(model, kv_capacity=capacity, num_splits=splits)
    return model


def feeds_of(model: ir.Model, inputs: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    named = {str(value.name) for value in model.graph.inputs}
    feeds = {name: array for name, array in inputs.items() if name in named}
    feeds |= {name: feeds[name][:, 0] for name in ("k_cache", "v_cache")}
    return {name: x.astype(DTYPES[dtype]) if x.dtype == np.float32 else x for name, x in feeds.items()}


def check(case: Case, dtype: str, splits: int | None, ops: Any = OPS, *, tolerance: float | None = None) -> None:
    """The lowered graph, with unused entries NaN, against the reference on the same rounded inputs."""
    inputs = make_inputs(case)
    for name, array in inputs.items():
        if array.dtype == np.float32:
            inputs[name] = array.astype(DTYPES[dtype]).astype(np.float32)
    scale = float(np.float32(case.scale))
    wanted = expect(replace(case, scale=scale), inputs)
    model = lower(case, dtype, splits)
    output, *caches = make_evaluator(model, ops).run(None, feeds_of(model, inputs, dtype))
    assert output.dtype == DTYPES[dtype]
    np.testing.assert_allclose(output.astype(float), wanted[0], atol=tolerance or TOLERANCE[dtype], rtol=0)
    for cache, expected in zip(caches, wanted[1:], strict=True):
        np.testing.assert_array_equal(cache.astype(float), expected[:, 0])


@pytest.mark.fuzz
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_the_reference(name: str, dtype: str, splits: int | None) -> None:
    check(CASES[name], dtype, splits)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    worker = InterpretedKernels()
    yield worker.ops()
    worker.close()


@pytest.mark.fuzz
@pytest.mark.parametrize("splits", [None, 2])
def test_graphs_with_the_real_kernels_equal_the_reference(splits: int | None, interpreted: Any) -> None:
    case = replace(CASES["everything"], rows=((3, 5), (17, 1), (9, 0), (0, 3)))
    check(case, "float16", splits, interpreted, tolerance=5e-3)  # weights are rounded before the second product


def test_another_window_is_another_result() -> None:
    """The comparisons above can fail."""
    case = CASES["everything"]
    model, inputs = lower(replace(case, window=4)), make_inputs(case)
    output = make_evaluator(model).run(None, feeds_of(model, inputs, "float16"))[0]
    assert np.abs(output.astype(float) - expect(case, inputs)[0]).max() > 0.1


def test_names_say_what_a_layer_is() -> None:
    model = lower(CASES["everything"], splits=3)
    assert [node.op_type for node in model.graph] == [
        "kv_append_float16_q2_h2_d16",
        "ragged_attention_float16_q4_h2_d16_x3e99999a_w5_c40000000_n3_sinks",
        "combine_splits_float16_q4_h2_d16_n3",
    ]
    assert all(plugin_spec(name).num_heads in (2, 4) for name in plugin_names(model))


def test_attention_reads_the_appended_caches_which_are_the_outputs() -> None:
    model = lower(CASES["values_smaller"], capacity=40)
    append, attention = model.graph
    assert list(append.inputs[2:4]) == [value for value in model.graph.inputs if "cache" in str(value.name)]
    assert list(attention.inputs[1:3]) == list(append.outputs) == list(model.graph.outputs[1:])
    assert [list(value.shape)[1:] for value in append.outputs] == [[2, 40, 24], [2, 40, 16]]
    assert [value.name for value in model.graph.outputs] == ["output", "k_cache_out", "v_cache_out"]


@pytest.mark.parametrize(
    ("capacity", "window", "splits"),
    [(1, -1, 1), (2047, -1, 1), (2048, -1, 2), (4112, -1, 4), (131072, -1, 8), (131072, 512, 1), (131072, 4096, 4)],
)
def test_splits_follow_the_entries_a_token_may_see(capacity: int, window: int, splits: int) -> None:
    assert trt_plugin.choose_num_splits(capacity, window) == splits
    case = replace(CASES["ragged"], window=window)
    assert any("combine_splits" in name for name in plugin_names(lower(case, capacity=capacity))) == (splits > 1)


def test_sinks_in_another_type_are_cast() -> None:
    model = one_node_model(CASES["sinks"])
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype == ir.DataType.FLOAT and value.name != "sinks":
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    trt_plugin.replace_attention(model, kv_capacity=CAPACITY)
    assert next(node.op_type for node in model.graph) == "Cast"
    assert model.graph[-1].inputs[5].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize(
    ("case", "dtype", "words"),
    [
        (CASES["ragged"], "float32", "attention layer 0 is FLOAT; the attention plugin computes float16 and bfloat16"),
        (replace(CASES["ragged"], k_dim=320, v_dim=320), "float16", "attention layer 0: Head size 320"),
        (replace(CASES["ragged"], kv_heads=3), "float16", "attention layer 0 has 4 query heads on 3"),
        (replace(CASES["ragged"], window=0), "float16", "attention layer 0: A window of 0"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(case: Case, dtype: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        lower(case, dtype)


def test_inputs_and_outputs_are_the_contracts() -> None:
    model = trace("gemma3", "bfloat16").ir_model.clone()
    lower_tensorrt(model, plugin=True, kv_capacity=CAPACITY)
    names = [str(value.name) for value in model.graph.inputs]
    assert find_lowered_problems(model) == []
    assert sorted(names[:5]) == ["cu_new_tokens", "input_ids", "kv_lens", "logit_rows", "positions"]
    assert [value.name for value in model.graph.outputs if "cache" not in str(value.name)] == ["logits", "token_ids"]
    assert not any(node.domain == "specexport" for node in model.graph)
    layers = [LayerGeometry(*(int(value.shape[axis]) for axis in (1, 3, 3))) for value in model.graph.inputs[5::2]]
    for profile in plan_profiles("target", lookahead=4, max_num_seqs=2, max_num_tokens=64):
        shapes = input_shapes(profile, step_inputs(model), layers, CAPACITY)
        assert sorted(shapes) == sorted(names)
        for value in model.graph.inputs:
            for size, dim in zip(shapes[str(value.name)][1], value.shape, strict=True):
                assert dim == size or not isinstance(dim, int)
    # Layers of one geometry share the plugin that appends; one layer in two has a window.
    kernels = [plugin_spec(name).kernel for name in plugin_names(model)]
    assert sorted(kernels) == ["kv_append", "ragged_attention", "ragged_attention"]
