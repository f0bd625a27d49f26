from pathlib import Path

import numpy as np
import pytest

from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine


@pytest.mark.parametrize("name", ["llama_tied", "phi", "mixtral"])
def test_the_same_logits_with_every_linear_layer_as_a_matrix_product(name: str, tmp_path: Path) -> None:
    from specexport.backends.ort import write_onnx
    from specexport.lowering.ort_cpu import lower_ort_cpu
    from specexport.passes.base import constant_of
    from specexport.passes.linear_flatten import LinearFlattenPass
    from specexport.passes.pipeline import default_passes, run_passes

    logits = []
    for flatten in (False, True):
        traced = trace_of(tiny_model(name))
        run_passes(traced.ir_model, default_passes("float32"))
        if flatten:
            before = sum(node.op_type == "MatMul" for node in traced.ir_model.graph)
            ((_, changed),) = run_passes(traced.ir_model, [LinearFlattenPass()])
            after = [node for node in traced.ir_model.graph if node.op_type == "MatMul"]
            assert changed > 0
            assert len(after) == before - changed
            # What stays multiplies activations by each other, or a weight of another form (experts).
            assert not [node for node in after if (w := constant_of(node.inputs[1])) is not None and len(w.shape) == 2]
            products = [node for node in traced.ir_model.graph if node.name and node.name.startswith("linear_flatten")]
            assert {node.inputs[1].name for node in products if node.op_type == "Gemm"} <= set(
                traced.ir_model.graph.initializers
            )
        lower_ort_cpu(traced.ir_model)
        folder = tmp_path / str(flatten)
        write_onnx(traced.ir_model, folder)
        engine = Engine(folder, traced.layers, num_rows=2, capacity=16)
        engine.step([[3, 4, 5], [6]], [0, 0])
        logits.append(engine.step([[7], [8, 9]], [3, 1]))
    assert np.isfinite(logits[0]).all()
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-5)
