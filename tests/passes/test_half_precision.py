"""Models loaded in half precision: which numbers are half, and which stay float32."""

from collections import Counter
from typing import Any

import onnx_ir as ir
import pytest

from specexport.passes.contract_check import ContractCheckPass
from specexport.passes.pipeline import default_passes, run_passes
from specexport.passes.precision_cast import PrecisionCastPass
from specexport_runtime.errors import CheckFailedError, RecipeError
from tests.support.models.half_models import load, trace
from tests.support.models.tiny_models import ARCHITECTURES

HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
MODELS = [
    ("llama", "float16"),
    ("gemma3", "bfloat16"),
    ("gpt2", "bfloat16"),
    ("mixtral", "float16"),
    ("deepseek_v3", "float16"),
    ("gptj", "bfloat16"),
    ("codegen", "float16"),
]
PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv")


@pytest.fixture(params=MODELS, ids="-".join)
def traced(request: pytest.FixtureRequest) -> tuple[str, ir.DataType, ir.Model]:
    name, dtype = request.param
    return name, HALVES[dtype], trace(name, dtype).ir_model


def test_weights_caches_and_matrix_products_are_half(traced: Any) -> None:
    name, half, model = traced
    products = Counter(value.dtype for node in model.graph if node.op_type in PRODUCTS for value in node.inputs[:2])
    # One router of DeepSeek multiplies in float32 because the model says so; its weight is half, and cast.
    assert products.pop(ir.DataType.FLOAT, 0) == (2 if name == "deepseek_v3" else 0)
    assert set(products) == {half}
    assert all(value.dtype == half for value in model.graph.inputs if "cache" in value.name)
    assert ContractCheckPass.problems(model) == []
    # GPT-J and CodeGen hold their rotary angles as tables in float32.
    weights = [v for v in model.graph.initializers.values() if not str(v.name).endswith("embed_positions")]
    matrices = [v.const_value for v in weights if len(v.const_value.shape) > 1]
    assert {tensor.dtype for tensor in matrices if tensor.dtype != ir.DataType.INT64} == {half}


def test_angles_are_computed_in_float32(traced: Any) -> None:
    name, _, model = traced
    angles = {node.inputs[0].dtype for node in model.graph if node.op_type in ("Cos", "Sin")}
    assert angles == (set() if name in {"gpt2", "gptj", "codegen"} else {ir.DataType.FLOAT})
    kept = ("inv_freq", "embed_positions")
    tables = [value for key, value in model.graph.initializers.items() if any(part in key for part in kept)]
    assert {value.const_value.dtype for value in tables} <= {ir.DataType.FLOAT}


def test_norms_compute_in_float32(traced: Any) -> None:
    _, _, model = traced
    norms = [node for node in model.graph if node.op_type in ("RMSNormalization", "LayerNormalization")]
    assert norms
    assert all(node.attributes.get_int("stash_type", 1) == int(ir.DataType.FLOAT) for node in norms)


def test_logits_leave_as_float32(traced: Any) -> None:
    _, half, model = traced
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    cast = logits.producer()
    assert (logits.dtype, cast.op_type, cast.inputs[0].dtype) == (ir.DataType.FLOAT, "Cast", half)


def test_half_logits_are_allowed_until_the_cast_and_never_after_it() -> None:
    from specexport.trace.check import trace_checkpoint
    from tests.support.references.engine_harness import make_checkpoint

    raw = trace_checkpoint(make_checkpoint(load(ARCHITECTURES["llama"], "bfloat16"))).ir_model
    words = "output logits is BFLOAT16, not float32"
    assert words in ContractCheckPass.problems(raw)
    assert ContractCheckPass.problems(raw, cast_to_come=True) == []
    without = [item for item in default_passes("bfloat16") if not isinstance(item, PrecisionCastPass)]
    with pytest.raises(CheckFailedError, match=f"after tracing .*{words}"):
        run_passes(raw.clone(), without)
    next(value for value in raw.graph.outputs if value.name == "logits").type = ir.TensorType(ir.DataType.FLOAT16)
    assert "output logits is FLOAT16, not float32" in ContractCheckPass.problems(raw, cast_to_come=True)


def test_a_trace_in_another_dtype_than_the_recipe_is_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"k_cache.0 was traced in BFLOAT16, the recipe says FLOAT16"):
        PrecisionCastPass("float16")(trace("llama", "bfloat16").ir_model.clone())
    with pytest.raises(RecipeError, match="models cannot have dtype 'int8'"):
        PrecisionCastPass("int8")
