"""Quantized linear layers: which, how closely, and that no token depends on its neighbours in the step."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.passes import default_passes, run_passes
from specexport.passes.quantize import quantizing_passes
from specexport.passes.quantize_int4 import HEAD_SHARE, quantize_blocks
from specexport.passes.quantize_int8 import _quantized
from specexport_runtime.errors import RecipeError, UnsupportedModelError
from tests.engine_harness import Engine, Recipe
from tests.tiny_models import VOCAB, make_llama
from tests.tiny_traces import tiny_model, trace_of

Traced = Callable[[str], Any]
NUM_LINEAR = {"llama_tied": 15, "gpt2": 9, "gemma3": 15, "opt": 15}
"""Linear layers with the LM head: 7 a layer for a gated MLP; gpt2 packs q, k and v; opt projects its embeddings."""
LEARNED_POSITIONS = {"gpt2": 1, "opt": 1}
LARGEST_ERROR = {"int8": 0.06, "int4": 0.5}
"""Relative L2 error of any row's logits against float32; an unrelated row is at about 1.4."""
PROMPTS = [[3, 4, 5, 9, 11, 7], [6, 8, 2]]
VERIFY = [[7, 12, 13, 250, 300], [8, 9]]


def build(name: str, folder: Path, quantize: str | None, **changes: Any) -> tuple[Any, Any, dict[str, int]]:
    """Compile an architecture; returns the graph after the passes, its layers and what each pass changed."""
    from specexport.backends.ort import write_onnx
    from specexport.lowering.ort_cpu import lower_ort_cpu

    traced = trace_of(tiny_model(name))
    report = dict(run_passes(traced.ir_model, default_passes(Recipe(), quantize=quantize, **changes)))
    passed = traced.ir_model.clone()
    lower_ort_cpu(traced.ir_model)
    write_onnx(traced.ir_model, folder)
    return passed, traced.layers, report


def verify_logits(folder: Path, layers: Any, rows: Seq[int]) -> np.ndarray:
    """Logits of a verify step of these sequences, after a prefill of each alone."""
    engine = Engine(folder, layers, num_rows=len(rows), capacity=24)
    for at, row in enumerate(rows):
        engine.step([PROMPTS[row]], [0], first_row=at)
    return engine.step([VERIFY[row] for row in rows], [len(PROMPTS[row]) for row in rows])


def worst_row(found: np.ndarray, reference: np.ndarray) -> float:
    """Largest relative L2 error of a row."""
    return float((np.linalg.norm(found - reference, axis=1) / np.linalg.norm(reference, axis=1)).max())


@pytest.mark.parametrize("name", NUM_LINEAR)
def test_every_linear_layer_is_quantized_and_the_logits_stay_near(name: str, tmp_path: Path) -> None:
    logits = {}
    for kind in (None, "int8", "int4"):
        folder = tmp_path / str(kind)
        graph, layers, report = build(name, folder, kind)
        logits[kind] = verify_logits(folder, layers, [0, 1])
        if kind is not None:
            assert report[f"{kind}-quantize"] + (kind == "int4") * report["int8-quantize"] == NUM_LINEAR[name]
            assert not [node for node in graph.graph if node.op_type == "Gemm"]
            large = [v for v in graph.graph.initializers.values() if len(v.shape) == 2 and v.dtype == ir.DataType.FLOAT]
            assert len(large) == LEARNED_POSITIONS.get(name, 0), "a float matrix that is no table of positions"
            assert 1e-5 < worst_row(logits[kind], logits[None]) < LARGEST_ERROR[kind]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, tmp_path: Path) -> None:
    _, layers, _ = build("qwen2", tmp_path, kind)
    together = verify_logits(tmp_path, layers, [0, 1])
    count = len(VERIFY[0])
    alone = verify_logits(tmp_path, layers, [0])
    np.testing.assert_allclose(together[:count], alone, atol=1e-4)
    np.testing.assert_allclose(together[count:], verify_logits(tmp_path, layers, [1]), atol=1e-4)
    engine = Engine(tmp_path, layers, num_rows=1, capacity=24)
    engine.step([PROMPTS[0]], [0])
    one_by_one = [engine.step([[token]], [len(PROMPTS[0]) + i]) for i, token in enumerate(VERIFY[0])]
    np.testing.assert_array_equal(np.concatenate(one_by_one), alone)


def test_one_scale_for_the_step_would_couple_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with the scale of quantize_dynamic, the largest of the step, it does."""
    from specexport.onnx_emit import Emitter

    op = Emitter.op

    def coupled(self: Any, op_type: str, *inputs: Any, **options: Any) -> Any:
        output = op(self, op_type, *inputs, **options)
        if op_type != "ReduceMax":
            return output
        whole = op(self, "ReduceMax", output, self.const(range(len(output.shape))), keepdims=1)
        return op(self, "Max", output, whole, shape=output.shape)

    monkeypatch.setattr(Emitter, "op", coupled)
    _, layers, _ = build("qwen2", tmp_path, "int8")
    together, alone = verify_logits(tmp_path, layers, [0, 1]), verify_logits(tmp_path, layers, [0])
    assert np.abs(together[: len(VERIFY[0])] - alone).max() > 1e-2


def test_layers_that_read_one_tensor_share_its_quantization(traced: Traced) -> None:
    model = traced("llama_tied")
    run_passes(model, default_passes(Recipe(), quantize="int8"))
    ops = [node.op_type for node in model.graph]
    # A layer reads four tensors: of q, k, v; of the output; of gate and up; of down. And the LM head's.
    assert (ops.count("QuantizeLinear"), ops.count("MatMulInteger")) == (2 * 4 + 1, 15)
    # Zero points are made once a step for tokens, and once for logit rows.
    assert ops.count("Expand") == 2


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_lm_head_can_stay_as_it_is(traced: Traced, kind: str) -> None:
    model = traced("llama_tied")
    report = dict(run_passes(model, default_passes(Recipe(), quantize=kind, quantize_lm_head=False)))
    assert report[f"{kind}-quantize"] == 14
    (head,) = [node for node in model.graph if node.op_type == "Gemm"]
    assert tuple(head.inputs[1].shape) == (VOCAB, 128)


@pytest.mark.parametrize(("vocab_size", "bits"), [(320, 8), (4000, 4)])
def test_a_small_lm_head_has_eight_bits_beside_int4(vocab_size: int, bits: int) -> None:
    model = make_llama(vocab_size=vocab_size, tie_word_embeddings=True)
    head, layers = vocab_size * 64, sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert (head / (head + layers) > HEAD_SHARE) == (bits == 4), "the test's own models"
    graph = trace_of(model).ir_model
    report = dict(run_passes(graph, default_passes(Recipe(), quantize="int4")))
    assert (report["int4-quantize"], report["int8-quantize"]) == ((15, 0) if bits == 4 else (14, 1))
    tables = [v for v in graph.graph.initializers.values() if v.dtype == ir.DataType.INT8 and len(v.shape or ()) == 2]
    assert len(tables) == 1, "of the embedding; a head of 8 bits is the same table"
    assert (tables[0].shape == ir.Shape([64, vocab_size])) == (bits == 8)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_batched_experts_are_refused_by_name(traced: Traced, name: str, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{kind} was asked for, and .*experts.* is no matrix.*--quantize"):
        run_passes(traced(name), default_passes(Recipe(), quantize=kind))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no quantization 'int3'.*int8 or int4"):
        quantizing_passes("int3", lm_head=True)


@pytest.mark.parametrize("turned", [False, True])
def test_int8_weights_are_within_half_a_step(turned: bool) -> None:
    weight = np.random.default_rng(0).normal(size=(48, 33)).astype(np.float32)
    weight[:, 3], weight[5] = 0, 0
    tensor, axis = ir.tensor(weight), int(turned)
    codes, scales = _quantized(tensor, turned)
    channels = weight if turned else weight.T
    largest = np.abs(channels).max(axis=1)
    np.testing.assert_allclose(scales, np.where(largest > 0, largest / 127, 1), rtol=1e-6)
    assert codes.shape == channels.T.shape
    assert np.isfinite(scales).all()
    assert (np.abs(codes.T * scales[:, None] - channels) <= scales[:, None] * 0.5001).all()
    assert np.abs(codes).max() == 127
    np.testing.assert_array_equal(np.abs(codes.astype(int)).max(axis=0) == 0, (weight == 0).all(axis=axis))


def test_int4_blocks_are_within_a_step_and_keep_zeros() -> None:
    weight = np.random.default_rng(1).normal(size=(7, 80)).astype(np.float32)  # 80: not whole blocks
    weight[2] = 0
    weight[:, 40:44] = 0
    codes, scales, zeros = quantize_blocks(weight)
    assert (codes.shape, scales.shape, zeros.shape) == ((7, 3, 16), (7, 3), (7, 2))
    plain = np.stack([codes & 15, codes >> 4], axis=-1).reshape(7, 3, 32).astype(np.float32)
    zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(7, 4)[:, :3]
    values = ((plain - zero[..., None]) * scales[..., None]).reshape(7, 96)
    assert (np.abs(values[:, :80] - weight) <= np.repeat(scales, 32, axis=1)[:, :80]).all()
    assert (values[:, :80][weight == 0] == 0).all()
    assert (values[:, 80:] == 0).all()
