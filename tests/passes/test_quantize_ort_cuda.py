"""Int4 weights for ONNX Runtime's GPU kernel: what is stored, and that the operator computes what codes stand for."""

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from specexport.passes.pipeline import default_passes, quantizing_passes, run_passes
from specexport.passes.quantize_ort_cuda import nbits_bytes, pack_channels
from specexport.passes.symmetric_blocks import quantize_blocks
from specexport_runtime.bundle.quant_kinds import INT4
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.half_models import load
from tests.support.models.quantized import build, products, rounded_model, verify_logits, worst_row
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references import engine_harness as harness

FORM: dict[str, Any] = {"backend": "ort-cuda"}


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64: 96 inputs, of which the tiny Llama has some, are then filled up."""
    monkeypatch.setitem(INT4.backends, "ort-cuda", INT4.backends["ort-cuda"]._replace(block=64))


def stand_for(channels: np.ndarray, block: int, rounded: Any = np.float16) -> np.ndarray:
    """The values [N, K] of the codes of a matrix, unpacked as the operator's documentation says."""
    packed, scales = pack_channels(channels, block, rounded)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], block)
    values = (codes.astype(np.float32) - 8) * scales[..., None]
    return values.reshape(len(channels), -1)[:, : channels.shape[1]]


def test_the_operator_computes_with_what_the_codes_stand_for(tmp_path: Path) -> None:
    """ONNX Runtime's own operator, on the CPU in float32: it reads codes and scales as they are laid out."""
    _, layers, _ = build("llama", tmp_path / "float", None)
    exact = verify_logits(tmp_path / "float", layers, [0, 1])
    graph, layers, report = build("llama", tmp_path / "int4", "int4", **FORM)
    found = verify_logits(tmp_path / "int4", layers, [0, 1])
    assert report["int4-fused"] == 15, "the layers of 96 inputs too"
    harness.build(rounded_model(partial(stand_for, block=64)), tmp_path / "rounded")
    rounded = verify_logits(tmp_path / "rounded", layers, [0, 1])
    assert worst_row(found, rounded) < 1e-5
    assert found.argmax(axis=1).tolist() == rounded.argmax(axis=1).tolist()
    assert worst_row(found, exact) > 1e-2
    nodes = [node for node in graph.graph if node.op_type == "MatMulNBits"]
    assert len(nodes) == 15
    assert all(len(node.inputs) == 3 for node in nodes), "no zero points"
    assert {node.attributes["accuracy_level"].as_int() for node in nodes} == {0}, "activations are not quantized"


@pytest.mark.parametrize("rounded", [np.float16, ml_dtypes.bfloat16])
def test_codes_are_those_of_the_other_form_with_scales_as_they_are_stored(rounded: Any) -> None:
    channels = np.random.default_rng(4).standard_normal((24, 80)).astype(np.float32)
    channels[:, 70:] = 0
    codes, scales = quantize_blocks(channels[:, :64].T, 32, rounded)
    other = (codes.astype(np.float32).reshape(2, 32, 24) * scales[:, None]).reshape(64, 24).T
    found = stand_for(channels, 32, rounded)
    np.testing.assert_array_equal(found[:, :64], other)
    assert not found[:, 70:].any(), "zeros stay zeros, in a block that was filled up too"
    stored = pack_channels(channels, 32, rounded)[1]
    np.testing.assert_array_equal(stored, stored.astype(rounded).astype(np.float32))


def test_bytes_of_the_layers_are_counted() -> None:
    model = trace_of(tiny_model("llama")).ir_model
    run_passes(model, default_passes("float32", quantize="int4", **FORM))
    stored, before = nbits_bytes(model.graph, "float16")
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    sizes = [[node.attributes[key].as_int() for key in "NK"] for node in nodes]
    assert before == sum(2 * width * depth for width, depth in sizes)
    assert stored == sum(width * -(-depth // 64) * (32 + 4) for width, depth in sizes), "float32 scales, here"
    written = [v.const_value for v in model.graph.initializers.values() if ".int4" in str(v.name)]
    assert stored == sum(tensor.numpy().nbytes for tensor in written)


def test_what_the_kernel_does_not_take_keeps_its_weights() -> None:
    """A number of outputs that is no multiple of 8, as of some vocabularies, would be made float in every step."""
    (quantize,) = quantizing_passes("int4", "ort-cuda")
    model = products(taken=(64, 40), filled_up=(96, 8), odd=(64, 317), odder=(36, 64))
    quantize(model)
    assert quantize.changes == 2
    assert [node.inputs[1].name for node in model.graph if node.op_type == "MatMul"] == ["odd", "odder"]
    with pytest.raises(UnsupportedModelError, match="no linear layer has a multiple of 8 inputs and of 8 outputs"):
        quantizing_passes("int4", "ort-cuda")[0](products(odd=(64, 317), odder=(36, 64)))


def test_scales_have_the_dtype_of_the_model() -> None:
    model = trace_of(load(ARCHITECTURES["llama"], "bfloat16")).ir_model
    run_passes(model, default_passes("bfloat16", quantize="int4", **FORM))
    scales = [v for v in model.graph.initializers.values() if str(v.name).endswith(".int4_scale")]
    assert {value.dtype for value in scales} == {ir.DataType.BFLOAT16}
    for value in scales:
        assert value.const_value.numpy().dtype == ml_dtypes.bfloat16
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert {value.dtype for node in nodes for value in (node.inputs[0], node.outputs[0])} == {ir.DataType.BFLOAT16}
