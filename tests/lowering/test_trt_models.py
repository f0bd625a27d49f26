"""Whole models lowered for TensorRT, evaluated in numpy, against eager transformers."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.lowering import trt_native
from specexport.lowering.common import step_inputs
from specexport.passes.contract_check import find_lowered_problems
from specexport.trace.check import compute_reference_logits
from specexport_runtime.abi import ALIGNED_STEP_INPUTS
from tests.support.cases import chance
from tests.support.models.half_models import HalfModel, trace
from tests.support.models.tiny_models import VOCAB
from tests.support.references.engine_harness import make_checkpoint
from tests.support.references.evaluator import PluginEngine
from tests.support.references.lowered import lower_ort_cuda, lower_tensorrt
from tests.support.references.trt_evaluator import Engine

PREFILL, VERIFY, CAPACITY = (9, 17, 4), (5, 1, 3), 40
MODELS = {
    ("llama", "float32"): ("explicit", "explicit"), ("gemma3", "float32"): ("explicit", "explicit"),
    ("gpt_oss", "float32"): ("explicit", "explicit"), ("deepseek_v3", "float32"): ("explicit", "explicit"),
    ("llama", "float16"): ("fused-causal", "fused-causal"), ("gemma3", "bfloat16"): ("fused-masked", "fused-causal"),
}  # fmt: skip
PLUGIN_MODELS = [
    ("llama", "float16"), ("gemma2", "float16"), ("gemma3", "bfloat16"), ("gpt_oss", "bfloat16"),
    ("deepseek_v3", "float16"),
]  # fmt: skip
# Of the largest logit. float32: order of sums. Halves: eager rounds scores and weights to half precision, TensorRT's
# attention does not, and two layers carry the difference to the logits.
TOLERANCE = {"float32": 3e-5, "float16": 1e-2, "bfloat16": 6e-2}


def sequences() -> list[list[int]]:
    random = np.random.default_rng(chance.seed(7))
    return [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PREFILL, VERIFY, strict=True)]


def lower(traced: HalfModel, **options: Any) -> tuple[Any, tuple[str, ...]]:
    model = traced.ir_model.clone()
    forms = lower_tensorrt(model, kv_capacity=CAPACITY, **options)
    return model, forms


def open_engine(model: Any, forms: tuple[str, ...], *fused_dtypes: str) -> Engine:
    poison = np.nan if set(forms) == {"fused-causal"} else 1e4  # where a mask hides entries, they must be finite
    return Engine(model, num_rows=3, fused_dtypes=fused_dtypes, poison=poison)


def compare(traced: HalfModel, engine: Engine, tolerance: float) -> None:
    """Prefill row by row, one ragged verify step, and one step of a fixed size with a row that sits out."""
    tokens, expected = sequences(), compute_reference_logits(make_checkpoint(traced.model), sequences())
    limit = tolerance * max(float(np.abs(logits).max()) for logits in expected)
    for row, past in enumerate(PREFILL):
        logits, ids = engine.step([tokens[row][:past]], [0], first_row=row)
        assert np.abs(logits - expected[row][:past]).max() < limit
        np.testing.assert_array_equal(ids, logits.argmax(1))
    fed = [ids[past:] for ids, past in zip(tokens, PREFILL, strict=True)]
    wanted = [logits[past:] for logits, past in zip(expected, PREFILL, strict=True)]
    logits, ids = engine.step(fed, PREFILL, width=7)
    assert np.abs(logits - np.concatenate(wanted)).max() < limit
    assert (ids >= 0).all()
    # The same step in a fixed profile: five tokens a row, dummies after the real ones; row 1 sits out.
    full = [[*fed[0]], [7] * 5, [*fed[2], 7, 7]]
    logits, _ = engine.step(full, [PREFILL[0], CAPACITY - 5, PREFILL[2]])
    assert np.abs(logits[:5] - wanted[0]).max() < limit
    assert np.abs(logits[10:13] - wanted[2]).max() < limit
    after, _ = engine.step([fed[1]], [PREFILL[1]], first_row=1)
    assert np.abs(after - wanted[1]).max() < limit


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_lowered_models_give_eager_logits(name: str, dtype: str) -> None:
    traced = trace(name, dtype)
    model, forms = lower(traced)
    assert forms == MODELS[name, dtype]
    compare(traced, open_engine(model, forms, "float16", "bfloat16"), TOLERANCE[dtype])


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "dtype"), PLUGIN_MODELS)
def test_models_over_the_plugin_give_eager_logits(name: str, dtype: str) -> None:
    """Entries that no token was written to hold NaN."""
    traced = trace(name, dtype)
    compare(traced, PluginEngine(lower(traced, plugin=True)[0], num_rows=3), TOLERANCE[dtype])


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "forms"), [("llama", ("fused-causal",) * 2), ("gemma3", MODELS["gemma3", "bfloat16"])]
)
def test_fused_forms_in_float32_are_exact(name: str, forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU computes these, but rounding cannot hide a wrong mask here."""
    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))
    traced = trace(name, "float32")
    model, found = lower(traced)
    assert found == forms
    compare(traced, open_engine(model, forms, "float32"), TOLERANCE["float32"])


def test_inputs_and_outputs_are_the_contracts() -> None:
    model, _ = lower(trace("gemma3", "bfloat16"))
    assert find_lowered_problems(model) == []
    assert set(step_inputs(model)) == {spec.name for spec in ALIGNED_STEP_INPUTS}
    assert [value.name for value in model.graph.outputs if "cache" not in str(value.name)] == ["logits", "token_ids"]
    assert all(value.uses() for value in model.graph.inputs)
    assert not any(node.domain == "specexport" for node in model.graph)
    # Two layers with a window and without share nothing but the step: one mask in all.
    assert sum(node.op_type == "LessOrEqual" for node in model.graph) == 1


@pytest.mark.parametrize("on_ort", [False, True])
def test_norms_with_float32_weights_are_computed_in_float32(on_ort: bool) -> None:
    """TensorRT rounds such a weight without a warning beside input in half precision; ONNX Runtime has no kernel."""
    model = trace("gemma3", "bfloat16").ir_model.clone()
    if on_ort:
        lower_ort_cuda(model)
    else:
        lower_tensorrt(model, kv_capacity=CAPACITY)
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    assert any(node.inputs[1].dtype == ir.DataType.FLOAT for node in norms)
    assert all(node.inputs[0].dtype == node.inputs[1].dtype for node in norms)


def test_the_model_sees_its_positions_and_rows() -> None:
    """A verify step on the wrong rows is far off: the comparisons above can fail."""
    traced = trace("llama", "float32")
    engine = Engine(lower(traced)[0], num_rows=3, poison=1e4)
    tokens, expected = sequences(), compute_reference_logits(make_checkpoint(traced.model), sequences())
    for row, past in enumerate(PREFILL):
        engine.step([tokens[row][:past]], [0], first_row=row)
    engine.caches = {name: cache[[2, 1, 0]] for name, cache in engine.caches.items()}
    wrong, _ = engine.step([tokens[2][PREFILL[2] :]], [PREFILL[2]], first_row=2)
    assert np.abs(wrong - expected[2][PREFILL[2] :]).max() > 0.1
