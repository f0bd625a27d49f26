"""A value has the same bits wherever in a tensor it is."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.lowering.value_by_value import make_value_by_value

TOKENS = 37


def run_on(op_type: str, width: int, changed: int | None) -> "ort.InferenceSession":
    """A session of one operator over [T, width]."""
    values = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", width])) for name in ("x", "y")
    ]
    node = ir.node(op_type, values[:1], outputs=values[1:], name="it")
    graph = ir.Graph(values[:1], values[1:], nodes=[node], opset_imports={"": 23}, name="g")
    model = ir.Model(graph, ir_version=10)
    if changed is not None:
        assert make_value_by_value(model) == changed
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def depends_on_its_place(session: "ort.InferenceSession", values: np.ndarray) -> bool:
    whole = session.run(None, {"x": values})[0]
    assert whole.shape == values.shape
    parts = [(start, start + count) for count in range(1, 10) for start in (0, 1, 5)]
    return any((session.run(None, {"x": values[a:b]})[0] != whole[a:b]).any() for a, b in parts)


@pytest.mark.parametrize("op_type", ["Sin", "Cos", "Log", "Softplus"])
@pytest.mark.parametrize("width", [1, 2, 10, 16])
def test_a_value_has_the_same_bits_in_a_tensor_of_any_size(op_type: str, width: int) -> None:
    values = np.abs(np.random.default_rng(4).normal(size=(TOKENS, width)).astype(np.float32)) * 30
    plain, changed = run_on(op_type, width, None), run_on(op_type, width, int(width < 16 or op_type == "Softplus"))
    assert not depends_on_its_place(changed, values)
    np.testing.assert_allclose(changed.run(None, {"x": values})[0], plain.run(None, {"x": values})[0], rtol=1e-6)


@pytest.mark.parametrize("op_type", ["Sigmoid", "Tanh", "Exp", "Erf", "Softmax", "Sqrt", "Reciprocal"])
@pytest.mark.parametrize("width", [1, 2, 10])
def test_these_need_no_change(op_type: str, width: int) -> None:
    values = np.abs(np.random.default_rng(4).normal(size=(TOKENS, width)).astype(np.float32)) * 3
    assert not depends_on_its_place(run_on(op_type, width, 0), values)
