"""Int8 embeddings: the rows that they give, one table with a tied LM head, and what stays as it is."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from specexport.passes import default_passes, run_passes
from specexport.passes.quantize_embedding import EmbeddingQuantizePass
from specexport.passes.quantize_int8 import Int8QuantizePass
from tests.engine_harness import Recipe
from tests.tiny_traces import tiny_model, trace_of

V, H = 50, 12
TABLE = (
    np.random.default_rng(0).normal(size=(V, H)).astype(np.float32) * np.linspace(0.1, 3, V, dtype=np.float32)[:, None]
)
TABLE[7] = 0


def lookup_model(ids_text: str, body: str, weights: dict[str, np.ndarray]) -> ir.Model:
    """A graph that looks ids up in TABLE; ``body`` is its nodes."""
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 23]> g ({ids_text}) => (float[m, n] y) {{ {body} }}',
        initializers=[ir.tensor(array, name=name) for name, array in weights.items()],
    )
    model.graph.outputs[0].shape = None
    return model


def run(model: ir.Model, **inputs: Any) -> np.ndarray:
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, inputs)
    return np.asarray(result)


def dequantized(rows: Any) -> np.ndarray:
    scales = np.abs(TABLE).max(axis=1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return (np.rint(TABLE / scales) * scales)[rows].astype(np.float32)


@pytest.mark.parametrize("shape", [[5], [1, 5], [2, 3, 4]])
def test_a_lookup_gives_the_rows_to_eight_bits(shape: list[int]) -> None:
    dims = ", ".join(map(str, shape))
    model = lookup_model(f"int64[{dims}] input_ids", "y = Gather <axis = 0> (table, input_ids)", {"table": TABLE})
    assert EmbeddingQuantizePass()(model).modified
    ids = np.random.default_rng(1).integers(0, V, shape)
    ids.reshape(-1)[0] = 7
    found = run(model, input_ids=ids)
    assert found.shape == (*shape, H)
    np.testing.assert_allclose(found, dequantized(ids), rtol=1e-6)
    assert np.abs(found - TABLE[ids]).max() <= np.abs(TABLE).max() / 127 / 1.99
    assert (found.reshape(-1, H)[0] == 0).all()


@pytest.mark.parametrize("shape", [[5], [1, 5]])
def test_a_tied_head_and_its_embedding_are_one_table(shape: list[int]) -> None:
    dims = ", ".join(map(str, shape))
    flat = "" if len(shape) == 1 else f"x = Flatten <axis = {len(shape)}> (found)"
    found = "found" if flat else "x"
    body = f"{found} = Gather <axis = 0> (table, input_ids) {flat} y = Gemm <transB = 1> (x, table)"
    model = lookup_model(f"int64[{dims}] input_ids", body, {"table": TABLE})
    for value in (node.outputs[0] for node in model.graph if node.op_type == "Gather"):
        value.shape, value.type = ir.Shape([*shape, H]), ir.TensorType(ir.DataType.FLOAT)
    Int8QuantizePass(lm_head=True)(model)
    EmbeddingQuantizePass()(model)
    ids = np.arange(5).reshape(shape) * 9
    tables = [
        value
        for value in model.graph.initializers.values()
        if value.name and len(value.shape or ()) == 2 and value.uses()
    ]
    assert [(value.name, list(value.shape or ())) for value in tables] == [("table.int8", [H, V])]
    rows = dequantized(ids.reshape(-1))
    np.testing.assert_allclose(run(model, input_ids=ids), rows @ dequantized(slice(None)).T, atol=0.05)


def test_what_tokens_do_not_look_up_stays() -> None:
    weights = {"table": TABLE}
    computed = "one = Constant <value = int64 {1}> () ids = Add (input_ids, one) y = Gather <axis = 0> (table, ids)"
    for text, body in (
        ("int64[5] positions", "y = Gather <axis = 0> (table, positions)"),
        ("int64[5] input_ids", computed),  # learned positions are read so
        ("int64[5] input_ids", "y = Gather <axis = 1> (table, input_ids)"),
    ):
        model = lookup_model(text, body, weights)
        assert not EmbeddingQuantizePass()(model).modified
        assert [node.op_type for node in model.graph][-1] == "Gather"


BUILDS = [("llama_tied", "int8"), ("llama_tied", "int4"), ("qwen2", "int8"), ("gpt2", "int8"), ("gemma3", "int4")]


@pytest.mark.parametrize(("name", "kind"), BUILDS)
def test_a_build_keeps_no_float_table(name: str, kind: str) -> None:
    traced = trace_of(tiny_model(name))
    report = dict(run_passes(traced.ir_model, default_passes(Recipe(), quantize=kind)))
    assert report["embedding-quantize"] == 1
    vocab = [
        v for v in traced.ir_model.graph.initializers.values() if max(v.shape or [0]) == 320 and len(v.shape or ()) == 2
    ]
    assert {v.dtype for v in vocab} <= {ir.DataType.INT8, ir.DataType.UINT8}


def test_a_float_head_keeps_its_embedding() -> None:
    traced = trace_of(tiny_model("llama_tied"))
    report = dict(run_passes(traced.ir_model, default_passes(Recipe(), quantize="int8", quantize_lm_head=False)))
    assert "embedding-quantize" not in report
    assert any(node.op_type == "Gather" and node.inputs[0].dtype == ir.DataType.FLOAT for node in traced.ir_model.graph)
