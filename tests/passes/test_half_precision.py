"""Models loaded in half precision: which numbers are half, and which stay float32."""

from collections import Counter

import onnx_ir as ir
import pytest

from specexport.passes.contract_check import find_contract_problems
from specexport.passes.pipeline import default_passes, run_passes
from specexport.passes.precision_cast import PrecisionCastPass
from specexport_runtime.errors import CheckFailedError, RecipeError
from tests.support.models.half_models import load, trace
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.models.tiny_traces import trace_of

HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
MODELS = {
    "gemma3": "bfloat16", "llama": "float16", "gpt2": "bfloat16", "mixtral": "float16", "deepseek_v3": "float16",
    "gptj": "bfloat16", "codegen": "float16",
}  # fmt: skip
PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv")
TABLES = ("inv_freq", "embed_positions")
"""Rotary angles: GPT-J and CodeGen hold them as tables."""


@pytest.mark.parametrize("name", MODELS)
def test_all_is_half_but_angles_norms_and_what_leaves(name: str) -> None:
    half, model = HALVES[MODELS[name]], trace(name, MODELS[name]).ir_model
    assert find_contract_problems(model) == []
    products = Counter(value.dtype for node in model.graph if node.op_type in PRODUCTS for value in node.inputs[:2])
    # One router of DeepSeek multiplies in float32 because the model says so; its weight is half, and cast.
    assert products.pop(ir.DataType.FLOAT, 0) == (2 if name == "deepseek_v3" else 0)
    assert set(products) == {half}
    assert all(value.dtype == half for value in model.graph.inputs if "cache" in value.name)
    weights = {str(v.name): v.const_value for v in model.graph.initializers.values()}
    tables = {key for key in weights if any(part in key for part in TABLES)}
    assert {weights[key].dtype for key in tables} <= {ir.DataType.FLOAT}
    matrices = {v.dtype for key, v in weights.items() if key not in tables and len(v.shape) > 1}
    assert matrices - {ir.DataType.INT64} == {half}
    angles = {node.inputs[0].dtype for node in model.graph if node.op_type in ("Cos", "Sin")}
    assert angles == (set() if name in {"gpt2", "gptj", "codegen"} else {ir.DataType.FLOAT})
    norms = [node for node in model.graph if node.op_type in ("RMSNormalization", "LayerNormalization")]
    assert norms
    assert all(node.attributes.get_int("stash_type", 1) == int(ir.DataType.FLOAT) for node in norms)
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    cast = logits.producer()
    assert (logits.dtype, cast.op_type, cast.inputs[0].dtype) == (ir.DataType.FLOAT, "Cast", half)


def test_half_logits_are_allowed_until_the_cast_and_never_after_it() -> None:
    raw = trace_of(load(ARCHITECTURES["llama"], "bfloat16")).ir_model
    words = "output logits is BFLOAT16, not float32"
    assert words in find_contract_problems(raw)
    assert find_contract_problems(raw, cast_to_come=True) == []
    without = [item for item in default_passes("bfloat16") if not isinstance(item, PrecisionCastPass)]
    with pytest.raises(CheckFailedError, match=f"after tracing .*{words}"):
        run_passes(raw.clone(), without)
    next(value for value in raw.graph.outputs if value.name == "logits").type = ir.TensorType(ir.DataType.FLOAT16)
    assert "output logits is FLOAT16, not float32" in find_contract_problems(raw, cast_to_come=True)


def test_a_trace_in_another_dtype_than_the_recipe_is_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"k_cache.0 was traced in BFLOAT16, the recipe says FLOAT16"):
        PrecisionCastPass("float16")(trace("llama", "bfloat16").ir_model.clone())
    with pytest.raises(RecipeError, match="models cannot have dtype 'int8'"):
        PrecisionCastPass("int8")
