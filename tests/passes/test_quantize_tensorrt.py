"""Int4 weights for GPUs: which layers, what is stored, and that the graph computes with what it stands for."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from specexport.passes.pipeline import default_passes, quantizing_passes, run_passes
from specexport.passes.symmetric_blocks import quantize_blocks
from specexport_runtime.errors import RecipeError, UnsupportedModelError
from tests.support.models.quantized import build, products, rounded_model, verify_logits, worst_row
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references import engine_harness as harness

FORM = {"backend": "tensorrt"}
NUM_LINEAR = 13
"""Two layers of 7 and the LM head, less the two of 96 inputs, which blocks of 64 do not divide."""
MATRIX = np.random.default_rng(5).standard_normal((256, 40)).astype(np.float32)


def values_of(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    wide = codes.astype(np.float32).reshape(len(scales), -1, codes.shape[1])
    return (wide * scales[:, None]).reshape(codes.shape)


@pytest.mark.parametrize("block", [32, 128])
def test_codes_are_within_half_a_step_and_nearer_than_the_largest_weight_alone_makes_them(block: int) -> None:
    codes, scales = quantize_blocks(MATRIX, block)
    assert codes.dtype == ml_dtypes.int4
    assert scales.shape == (256 // block, 40)
    assert np.array_equal(scales, scales.astype(np.float16)), "scales are stored in 16 bits"
    assert codes.astype(np.int8).min() == -8, "the code that has no opposite is used"
    found = values_of(codes, scales)
    steps = np.repeat(np.abs(scales), block, axis=0)
    inside = np.abs(codes.astype(np.float32)) < 7  # the others may have been cut off
    assert (np.abs(found - MATRIX) <= steps * 0.5001)[inside].all()
    wide = MATRIX.reshape(-1, block, 40)
    plain = np.abs(wide).max(axis=1, keepdims=True) / 7
    rounded = np.clip(np.rint(wide / plain), -8, 7) * plain
    assert np.square(found - MATRIX).mean() < 0.85 * np.square(rounded - wide).mean()


def test_zeros_stay_zeros() -> None:
    matrix = MATRIX.copy()
    matrix[:128, 3] = 0
    found = values_of(*quantize_blocks(matrix, 128))
    assert np.isfinite(found).all()
    assert not found[:128, 3].any()


def test_the_graph_computes_with_what_the_codes_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's CPU computes the graph as it stands, if it is not let join the two nodes into one of its own."""
    import onnxruntime as ort

    def options() -> Any:
        made = make()
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return made

    make = ort.SessionOptions
    monkeypatch.setattr(ort, "SessionOptions", options)
    _, layers, _ = build("llama", tmp_path / "float", None)
    exact = verify_logits(tmp_path / "float", layers, [0, 1])
    graph, layers, report = build("llama", tmp_path / "int4", "int4", **FORM, own_operators=False)
    assert report["int4-weights"] == NUM_LINEAR
    found = verify_logits(tmp_path / "int4", layers, [0, 1])
    harness.build(rounded_model(lambda weight: values_of(*quantize_blocks(weight.T, 64)).T, [64]), tmp_path / "rounded")
    assert worst_row(found, verify_logits(tmp_path / "rounded", layers, [0, 1])) < 1e-5
    assert worst_row(found, exact) > 1e-2
    stored = [value for value in graph.graph.initializers.values() if str(value.name).endswith(".int4")]
    assert len(stored) == NUM_LINEAR
    for value in stored:
        (use,) = value.uses()
        (product,) = use.node.outputs[0].uses()
        assert (use.node.op_type, product.node.op_type) == ("DequantizeLinear", "MatMul")
        assert len(product.node.inputs[0].shape) == 2, "with a batch axis the weight would be kept twice"
    floats = [value for value in graph.graph.initializers.values() if value.dtype == ir.DataType.FLOAT]
    matrices = {tuple(map(int, v.shape)) for v in floats if len(v.shape) == 2 and not str(v.name).endswith("_scale")}
    assert matrices == {(320, 64), (96, 64)}, "the embedding, and what the block does not divide"


def test_the_lm_head_can_stay_as_it_is() -> None:
    model = trace_of(tiny_model("llama")).ir_model
    passes = default_passes("float32", quantize="int4", **FORM, quantize_lm_head=False)
    assert dict(run_passes(model, passes))["int4-weights"] == NUM_LINEAR - 1


def test_a_model_that_no_block_divides_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="multiple of 64 inputs"):
        quantizing_passes("int4", "tensorrt")[0](products(first=(48, 64), second=(72, 64)))


@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_engines_lack_is_refused(kind: str, backend: str) -> None:
    with pytest.raises(RecipeError, match=kind):
        quantizing_passes(kind, backend)


@pytest.mark.parametrize("rounded", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("size", [1e-7, 4e-6, 1e-3, 1e3])
def test_small_weights_are_not_lost(rounded: Any, size: float) -> None:
    matrix = (MATRIX / np.abs(MATRIX).max() * np.float32(size)).astype(rounded).astype(np.float32)
    found = values_of(*quantize_blocks(matrix, 32, rounded))
    blocks = np.abs(matrix).reshape(-1, 32, matrix.shape[1]).max(axis=1).repeat(32, axis=0)
    # Half a step of the largest, which a smaller scale may cut off; and what float16 has between two numbers, 8 times.
    slack = 8 * 2.0**-25 if rounded is np.float16 else 0
    assert (np.abs(found - matrix) <= blocks * 0.25 + slack).all()
    assert np.abs(found - matrix).mean() <= np.abs(matrix).mean() * 0.15


@pytest.mark.parametrize("rounded", [np.float16, ml_dtypes.bfloat16])
def test_weights_whose_scales_are_beyond_what_is_stored_are_refused(rounded: Any) -> None:
    matrix = MATRIX * np.float32(1e5 if rounded is np.float16 else 1e15)
    codes, scales = quantize_blocks(matrix, 32, rounded)
    assert np.isfinite(scales).all()
    assert np.abs(values_of(codes, scales) - matrix).max() < np.abs(matrix).max() / 7
    for large in (np.inf, np.nan, *([-6e5] if rounded is np.float16 else [])):
        matrix[40, 7] = large
        with pytest.raises(UnsupportedModelError, match="larger than quantization can store"):
            quantize_blocks(matrix, 32, rounded)
