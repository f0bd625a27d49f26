"""A value has the same bits wherever in a tensor it is."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.lowering.ort_cpu import make_value_by_value
from specexport.onnx_emit import Emitter
from tests.support.references.ort_operators import BY_ROW, EACH, LEFT, WHOLE
from tests.support.references.sessions import session_of

TOKENS = 37
CONTRIB = {"FastGelu", "QuickGelu", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}


def run_on(op_type: str, width: int, changed: int | None) -> "ort.InferenceSession":
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", width]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 23, "com.microsoft": 1}, name="g")
    emit, inputs = Emitter(graph, "it"), [x, x] if op_type.startswith("Skip") else [x]
    if "Norm" in op_type and op_type != "LpNormalization":
        inputs.append(emit.const(np.linspace(0.5, 2, width).tolist(), "float32"))
    elif op_type.startswith("Reduce"):
        inputs.append(emit.const([-1]))
    elif op_type == "Pow":
        inputs.append(emit.const([2.0], "float32"))
    y = emit.op(op_type, *inputs, domain="com.microsoft" if op_type in CONTRIB else "", dtype=x.dtype)
    graph.extend(emit.nodes)
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=10)
    if changed is not None:
        assert make_value_by_value(model) == changed
    return session_of(model)


def depends_on_its_place(session: "ort.InferenceSession", values: np.ndarray) -> bool:
    whole = session.run(None, {"x": values})[0]
    assert len(whole) == len(values)
    parts = [(start, start + count) for count in range(1, 10) for start in (0, 1, 5)]
    return any((session.run(None, {"x": values[a:b]})[0] != whole[a:b]).any() for a, b in parts)


@pytest.mark.parametrize("op_type", [*LEFT[WHOLE], "Softplus"])  # the latter becomes LinearAttentionGate
@pytest.mark.parametrize("width", [1, 2, 10, 16])
def test_a_value_has_the_same_bits_in_a_tensor_of_any_size(op_type: str, width: int) -> None:
    values = np.abs(np.random.default_rng(4).normal(size=(TOKENS, width)).astype(np.float32)) * 30
    plain, changed = run_on(op_type, width, None), run_on(op_type, width, int(width < 16 or op_type == "Softplus"))
    assert not depends_on_its_place(changed, values)
    np.testing.assert_allclose(changed.run(None, {"x": values})[0], plain.run(None, {"x": values})[0], rtol=1e-6)


@pytest.mark.parametrize("op_type", sorted({*LEFT[EACH], *LEFT[BY_ROW]} - {"LinearAttentionGate", "RotaryEmbedding"}))
@pytest.mark.parametrize("width", [1, 2, 10, 67])
def test_these_need_no_change(op_type: str, width: int) -> None:
    values = np.abs(np.random.default_rng(4).normal(size=(TOKENS, width)).astype(np.float32)) * 3
    assert not depends_on_its_place(run_on(op_type, width, 0), values)
