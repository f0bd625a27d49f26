"""Quantized linear layers: which, and how closely."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.ops.spec import EXPERTS
from specexport.passes.block_experts import pack_rounded_experts
from specexport.passes.block_format import unpack
from specexport.passes.block_linear import pack_blocks
from specexport.passes.block_make import int4_weight, int8_weight, round_up_to_half
from specexport.passes.pipeline import default_passes, quantizing_passes, run_passes
from specexport.passes.quantize_ort_cpu import HEAD_SHARE, BlockQuantizePass
from specexport_runtime.errors import RecipeError, UnsupportedModelError
from tests.support.models.quantized import build, verify_logits, worst_row
from tests.support.models.tiny_models import VOCAB
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.lowered import lower_ort_cpu
from tests.support.references.sessions import session_of

Traced = Callable[[str], Any]
NUM_LINEAR = {"llama_tied": 15, "gpt2": 9, "gemma3": 15, "opt": 15}
"""Linear layers with the LM head: 7 a layer for a gated MLP; gpt2 packs q, k and v; opt projects its embeddings."""
LEARNED_POSITIONS = {"gpt2": 1, "opt": 1}
LARGEST_ERROR = {"int8": 0.06, "int4": 0.5}
"""Relative L2 error of any row's logits against float32; an unrelated row is at about 1.4."""


@pytest.mark.parametrize("name", NUM_LINEAR)
def test_every_linear_layer_is_quantized_and_the_logits_stay_near(name: str, tmp_path: Path) -> None:
    logits = {}
    for kind in (None, "int8", "int4"):
        folder = tmp_path / str(kind)
        graph, layers, report = build(name, folder, kind)
        logits[kind] = verify_logits(folder, layers, [0, 1])
        if kind is not None:
            assert report[f"{kind}-quantize"] == NUM_LINEAR[name] + 1, "and the embedding"
            assert not [node for node in graph.graph if node.op_type in ("Gemm", "MatMul")]
            large = [v for v in graph.graph.initializers.values() if len(v.shape) == 2 and v.dtype == ir.DataType.FLOAT]
            assert len(large) == LEARNED_POSITIONS.get(name, 0), "a float matrix that is no table of positions"
            assert 1e-5 < worst_row(logits[kind], logits[None]) < LARGEST_ERROR[kind]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_lm_head_can_stay_as_it_is(traced: Traced, kind: str) -> None:
    model = traced("llama_tied")
    report = dict(run_passes(model, default_passes("float32", quantize=kind, quantize_lm_head=False)))
    assert report[f"{kind}-quantize"] == 14
    assert any(node.op_type == "Gather" and node.inputs[0].dtype == ir.DataType.FLOAT for node in model.graph)
    (head,) = [node for node in model.graph if node.op_type == "Gemm"]
    assert tuple(head.inputs[1].shape) == (VOCAB, 64)


@pytest.mark.parametrize(("share", "bits"), [(HEAD_SHARE, 8), (0.2, 4)])
def test_a_small_lm_head_has_eight_bits_beside_int4(share, bits, traced, monkeypatch):
    monkeypatch.setattr("specexport.passes.quantize_ort_cpu.HEAD_SHARE", share)
    graph = traced("llama_tied")
    report = dict(run_passes(graph, default_passes("float32", quantize="int4")))
    assert report["int4-quantize"] == 16
    formats = formats_of(graph)
    assert formats["BlockEmbedding"] == ["int8"]
    assert formats["BlockLinear"].count("int8") == (bits == 8)
    tables = {node.inputs[1].name for node in graph.graph if node.attributes.get_int("N", 0) == VOCAB}
    assert len(tables) == (1 if bits == 8 else 2), "a head of 8 bits and the embedding are one table"


def formats_of(model: ir.Model) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"BlockLinear": [], "BlockEmbedding": []}
    for node in model.graph:
        if node.op_type in found:
            found[node.op_type].append(node.attributes["format"].as_string())
    return found


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_batched_experts_are_refused_by_name(traced: Traced, name: str, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{kind} was asked for, and .*experts.* is no matrix.*--quantize"):
        run_passes(traced(name), default_passes("float32", quantize=kind))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_quantized_and_their_routers_to_eight_bits(name: str, kind: str) -> None:
    graph = trace_of(tiny_model(name), group_experts=True).ir_model
    assert dict(run_passes(graph, default_passes("float32", quantize=kind)))["experts-quantize"] == 2
    routers = [n for n in graph.graph if n.op_type == "BlockLinear" and n.attributes["N"].as_int() == 4]
    assert [node.attributes["format"].as_string() for node in routers] == ["int8"] * 2
    lower_ort_cpu(graph)
    assert not any(node.op_type in ("MatMul", "Gemm", EXPERTS.name) for node in graph.graph)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no quantization 'int3'.*int8 or int4"):
        quantizing_passes("int3", "ort-cpu")


@pytest.mark.parametrize("turned", [False, True])
def test_int8_blocks_are_within_half_a_step(turned: bool) -> None:
    weight = np.random.default_rng(0).normal(size=(48, 80)).astype(np.float32)
    weight[5, :], weight[:, 3] = 0, 0
    channels = weight if turned else weight.T
    found = int8_weight(ir.tensor(weight), turned=turned)
    blocks = found.read(np.arange(len(channels)))
    assert found.shape == (len(channels), -(-channels.shape[1] // 32) * 32)
    assert np.isfinite(blocks.scales).all()
    assert (blocks.scales == blocks.scales.astype(np.float16)).all(), "as they are stored"
    values = found.floats()[:, : channels.shape[1]]
    assert (np.abs(values - channels) <= np.repeat(blocks.scales, 32, axis=1)[:, : channels.shape[1]] * 0.5001).all()
    assert (values[channels == 0] == 0).all()
    assert (found.floats()[:, channels.shape[1] :] == 0).all()
    np.testing.assert_array_equal(found.floats(np.arange(17, 30)), found.floats()[17:30])


def test_int4_blocks_are_within_a_step_and_keep_zeros() -> None:
    weight = np.random.default_rng(1).normal(size=(7, 80)).astype(np.float32)  # 80: not whole blocks
    weight[2] = 0
    weight[:, 40:44] = 0
    for importance in (None, np.ones(80, np.float32)):
        found = int4_weight(ir.tensor(weight), turned=True, importance=importance)
        scales = found.read(np.arange(7)).scales
        assert (scales == scales.astype(np.float16)).all(), "as they are stored"
        values = found.floats()
        steps = np.repeat(scales, 32, axis=1)[:, :80] * (1 if importance is None else 5)
        assert (np.abs(values[:, :80] - weight) <= steps).all()
        assert (values[:, :80][weight == 0] == 0).all()
        assert (values[:, 80:] == 0).all()


SIZES = [1e-30, 1e-9, 1e-7, 1e-5, 1e-3, 1e3, 1e6, 1e9]
"""Times a weight of about 1: scales of 8 bits then lie on both sides of what float16 holds."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["8", "4", "4 measured", "8 experts", "4 experts"])
def test_blocks_lose_as_little_of_small_and_large_weights(size: float, way: str) -> None:
    draw = np.random.default_rng(6)
    weight = (draw.uniform(-1, 1, (16, 64)) * size).astype(np.float32)
    weight[:, :32] *= np.float32(1e-2)  # a block of small ones
    bits = int(way[0])
    if "experts" in way:
        packed = pack_rounded_experts(ir.tensor(weight[None]), bits)
        found = unpack(packed.format, packed.make(), 16, 64)
    else:
        importance = np.ones(64, np.float32) if "measured" in way else None
        made = (
            int8_weight(ir.tensor(weight), turned=True)
            if bits == 8
            else int4_weight(ir.tensor(weight), turned=True, importance=importance)
        )
        found = unpack(pack_blocks(made).format, pack_blocks(made).make(), 16, 64)
    steps = 254 if bits == 8 else 15
    spread = np.abs(weight).reshape(16, 2, 32).max(axis=2).repeat(32, axis=1) * 2 / steps
    assert (np.abs(found - weight) <= spread * {"8": 0.54, "4": 1.1}[way[0]] * (2 if "measured" in way else 1)).all()


@pytest.mark.parametrize("measured", [False, True])
def test_weights_that_are_no_numbers_are_refused(measured: bool) -> None:
    weight = np.zeros((2, 64), np.float32)
    importance = np.ones(64, np.float32) if measured else None
    for odd in (np.inf, -np.inf, np.nan):
        weight[1, 40] = odd
        for made in (
            int4_weight(ir.tensor(weight), turned=True, importance=importance),
            int8_weight(ir.tensor(weight), turned=True),
        ):
            with pytest.raises(UnsupportedModelError, match="larger than quantization can store"):
                made.read(np.arange(2))


def test_scales_are_rounded_up_to_what_is_stored() -> None:
    scales = np.abs(np.random.default_rng(2).normal(size=1000)).astype(np.float32) * 10.0 ** np.arange(-9, 1).repeat(
        100
    )
    found = round_up_to_half(scales.astype(np.float32)).astype(np.float32)
    assert (found >= scales.astype(np.float32)).all()
    assert (found[scales > 1e-4] <= scales[scales > 1e-4] * 1.001).all()
    for odd in (np.inf, np.nan, 1e6):
        with pytest.raises(UnsupportedModelError, match="larger than quantization can store"):
            round_up_to_half(np.array([odd], np.float32))


V, H = 50, 12
TABLE = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)


def lookup_model(ids_text: str, body: str) -> ir.Model:
    text = (
        f'<ir_version: 10, opset_import: ["": 23]> g ({ids_text}, float[T, {H}] x) => (float[m, n] y, float[T, 4] z) {{'
    )
    given = {"table": TABLE, "other": TABLE[:4].T.copy()}
    model = ir.from_onnx_text(
        f"{text} {body} z = MatMul (x, other) }}", initializers=[ir.tensor(a, name=name) for name, a in given.items()]
    )
    model.graph.outputs[0].shape = None
    return model


@pytest.mark.parametrize("shape", [[5], [1, 5], [2, 3, 4]])
def test_a_lookup_gives_the_rows_to_eight_bits(shape: list[int]) -> None:
    dims = ", ".join(map(str, shape))
    model = lookup_model(f"int64[{dims}] input_ids", "y = Gather <axis = 0> (table, input_ids)")
    assert BlockQuantizePass(8, lm_head=True)(model).modified
    ids = np.random.default_rng(1).integers(0, V, shape)
    found = session_of(model).run(["y"], {"input_ids": ids, "x": np.zeros((1, H), np.float32)})[0]
    np.testing.assert_array_equal(found, int8_weight(ir.tensor(TABLE), turned=True).floats()[ids, :H])
    assert np.abs(found - TABLE[ids]).max() <= np.abs(TABLE).max() / 127 / 1.99


def test_what_tokens_do_not_look_up_stays() -> None:
    computed = "one = Constant <value = int64 {1}> () ids = Add (input_ids, one) y = Gather <axis = 0> (table, ids)"
    for text, body in (
        ("int64[5] positions", "y = Gather <axis = 0> (table, positions)"),
        ("int64[5] input_ids", computed),  # learned positions are read so
        ("int64[5] input_ids", "y = Gather <axis = 1> (table, input_ids)"),
    ):
        model = lookup_model(text, body)
        BlockQuantizePass(8, lm_head=True)(model)
        assert formats_of(model) == {"BlockLinear": ["int8"], "BlockEmbedding": []}


@pytest.mark.parametrize(("stored", "kind"), [("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")])
def test_float_weights_are_as_narrow_as_what_they_hold(stored: str, kind: str, traced: Traced) -> None:
    import ml_dtypes  # noqa: F401 names bfloat16

    model = traced("llama_tied")
    for value in model.graph.initializers.values():
        if value.const_value.dtype == ir.DataType.FLOAT:
            held = value.const_value.numpy().astype(stored).astype(np.float32)
            value.const_value = ir.tensor(held, name=value.name)
    report = dict(run_passes(model, default_passes("float32", own_operators=True)))
    assert report["float-blocks"] == 16
    assert formats_of(model) == {"BlockLinear": [kind] * 15, "BlockEmbedding": [kind]}
