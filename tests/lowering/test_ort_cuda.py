"""The paged lowering against the op's reference and eager models, its kernel replaced by its documentation in numpy."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from specexport.lowering.common import step_inputs
from specexport.lowering.fuse import fuse_norms
from specexport.lowering.ort_cuda import attach_paged_attention
from specexport.ops.spec import UNPADDED_ATTENTION
from specexport.passes.pipeline import quantizing_passes
from specexport.passes.quantize_ort_cuda import pack_channels
from specexport.trace.check import compute_reference_logits
from specexport_runtime.abi import LayerGeometry, StepShape
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors import ort_cuda
from specexport_runtime.executors.ort_cuda import OrtCudaExecutor
from specexport_runtime.executors.paged import BLOCK_ENTRIES, CUDNN_SWITCH, paged_head_size
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.cases import chance
from tests.support.cases.attention_cases import Case, draw, expected
from tests.support.cases.entries import make_entry
from tests.support.cases.unpadded_cases import one_node_model
from tests.support.fakes.fake_onnxruntime import FakeOrt
from tests.support.models.half_models import trace
from tests.support.models.tiny_models import VOCAB
from tests.support.references.cuda_graphs import PagedEngine, ReferenceSession, gpu_or_skip
from tests.support.references.engine_harness import make_checkpoint, pack
from tests.support.references.lowered import fuse_for_paging, lower_ort_cuda

STEP = ["input_ids", "positions", "logit_rows", "kv_lens", "cu_new_tokens", "block_table", "attention_metadata"]
# A dtype of each for the tests of whole engines: traced once, used by both.
ENGINES = [("llama", "float16"), ("deepseek_v3", "bfloat16")]


def attention_model(case: Case, dtype: str = "float32") -> ir.Model:
    """One attention node between graph inputs and outputs, and logits that are passed through."""
    model = one_node_model(case, dtype)
    graph = model.graph
    graph.inputs.pop()  # positions
    for value in (*graph.inputs, *graph.outputs):
        value.name += ".0" if "_cache" in value.name else ""
    logits = ir.Value(name="logits_in", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["R", "V"]))
    same = ir.node("Identity", [logits])
    same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = "logits", logits.type, logits.shape
    graph.inputs.append(logits)
    graph.append(same)
    graph.outputs.append(same.outputs[0])
    return model


# Rows of a block and more, a row of nothing, and new entries on both sides of a block's end.
ROWS = ((BLOCK_ENTRIES - 2, 4), (0, 3), (7, 0), (BLOCK_ENTRIES + 3, 1))
CASES = {
    "grouped": Case(ROWS),
    "window": Case(ROWS, heads=2, window=3),
    "softcap": Case(ROWS, kv_heads=1, k_dim=8, v_dim=8, softcap=1.5),
    "sinks": Case(ROWS, sinks=True, window=4),
    "values_smaller": Case(ROWS, k_dim=24, sinks=True),
    "values_larger": Case(ROWS, heads=2, k_dim=8, v_dim=20, softcap=2.0),
    "odd": Case(ROWS, k_dim=10, v_dim=10, window=2),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
def test_a_node_equals_the_reference_of_the_op(name: str) -> None:
    case = CASES[name]
    model = attention_model(case)
    attach_paged_attention(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    engine = PagedEngine(proto, [LayerGeometry(case.kv_heads, case.k_dim, case.v_dim)], num_rows=4)
    drawn = draw(case, chance.seed(1))
    for part, size in (("k_cache", case.k_dim), ("v_cache", case.v_dim)):
        blocks = engine.caches[f"{part}.0"]
        for row, (past, _) in enumerate(case.rows):
            entries = np.arange(past)
            places = engine.table[row, entries // BLOCK_ENTRIES], entries % BLOCK_ENTRIES
            blocks[places] = 0
            blocks[(*places, slice(None), slice(size))] = drawn[part][row, 0, :, :past].swapaxes(0, 1)
    pasts, counts = zip(*case.rows, strict=True)
    given = pack([[0] * count for count in counts], pasts) | {"logits_in": np.zeros((1, 2), np.float32)}
    given |= {part: drawn[part] for part in ("q", "k", "v", "sinks") if part in drawn}
    outputs = engine.run(given)
    np.testing.assert_allclose(outputs["output"], expected(case, drawn)[0], atol=1e-5)
    one_each = engine.run(given, row_for_each=True)
    for part, array in outputs.items():  # caches too
        np.testing.assert_array_equal(one_each[part], array)


def traced(name: str, dtype: str, *, pack: bool = False) -> Any:
    result = trace(name, dtype, pack=pack)
    return result, make_checkpoint(result.model)


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("name", "dtype"), ENGINES)
def test_a_lowered_graph_lacks_nothing_but_the_kernel(name: str, dtype: str, tmp_path: Path) -> None:
    result, _ = traced(name, dtype)
    model = result.ir_model.clone()
    lower_ort_cuda(model)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.input if "cache" not in value.name] == STEP
    cache_type = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    layer = result.layers[0]
    sizes = ["kv_blocks", BLOCK_ENTRIES, layer.kv_heads, paged_head_size(layer)]
    for value in (*proto.graph.input, *proto.graph.output):
        if "cache" in value.name:
            assert value.type.tensor_type.elem_type == cache_type
            assert [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] == sizes
    nodes = [node for node in proto.graph.node if node.op_type == "PagedAttention"]
    assert len(nodes) == 2
    assert not any(node.domain == "specexport" for node in proto.graph.node)
    # ONNX Runtime resolves every type and shape by its own schemas first. Only then does it look for kernels of the
    # CPU: in float16 it tries to widen what has none, in bfloat16 it names the first node that has none.
    left = {"float16": r"InsertedPrecisionFreeCast_\w+\) of operator \(PagedAttention\)", "bfloat16": "NOT_IMPLEMENTED"}
    with pytest.raises(Exception, match=left[dtype]):
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    next(value for value in proto.graph.input if value.name == "block_table").type.tensor_type.elem_type = 7
    with pytest.raises(Exception, match=r"int64.*block_table.*PagedAttention"):
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_int4_graph_lacks_nothing_but_the_kernels(dtype: str, tmp_path: Path) -> None:
    model = traced("llama", dtype)[0].ir_model.clone()
    quantize(model)
    lower_ort_cuda(model)
    ir.save(model, tmp_path / "model.onnx")
    (schema,) = (item for item in ort_state.get_all_operator_schema() if item.name == "MatMulNBits")
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert len(nodes) == 15
    for node in nodes:
        assert set(node.attributes) <= set(schema.attributes)
        assert [item.name for item in schema.inputs][: len(node.inputs)] == ["A", "B", "scales"]
    left = {"float16": r"operator \(PagedAttention\)", "bfloat16": "NOT_IMPLEMENTED"}
    with pytest.raises(Exception, match=left[dtype]):  # types and shapes have been resolved by then
        onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])


def test_inputs_lie_where_the_operators_schema_has_them() -> None:
    model = attention_model(Case(sinks=True), "float16")
    lower_ort_cuda(model)
    (schema,) = (item for item in ort_state.get_all_operator_schema() if item.name == "PagedAttention")
    (node,) = (node for node in model.graph if node.op_type == "PagedAttention")
    places = {item.name: value.name for item, value in zip(schema.inputs, node.inputs, strict=False) if value}
    assert places == {
        "query": "q", "key": "k", "value": "v", "key_cache": "k_cache.0", "value_cache": "v_cache.0",
        "cumulative_sequence_length": "cu_new_tokens", "past_seqlens": "past_seqlens", "block_table": "block_table",
        "head_sink": "sinks", "attention_metadata": "attention_metadata",
    }  # fmt: skip
    assert set(node.attributes) <= set(schema.attributes)
    assert {value.name for value in model.graph.inputs} >= {"block_table", "attention_metadata", "sinks"}


def test_dtypes_and_heads_without_a_kernel_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="float16 and bfloat16, not FLOAT") as caught:
        lower_ort_cuda(attention_model(Case()))
    assert "ort-cpu" in str(caught.value)
    model = attention_model(Case(k_dim=264), "float16")
    with pytest.raises(UnsupportedModelError, match="heads of up to 256, not 264"):
        lower_ort_cuda(model)
    assert any(node.op_type == "UnpaddedAttention" for node in model.graph), "a refused graph is left as it was"
    # Those of the operator but sinks and slopes, and logits.
    assert len(model.graph.inputs) == len(UNPADDED_ATTENTION.inputs) - 1


def test_greedy_tokens_of_rows_with_and_without_nan() -> None:
    """Run by ONNX Runtime itself: no attention is in the way of these four nodes."""
    logits = ir.Value(name="logits_in", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["R", "V"]))
    kv_lens = ir.Value(name="kv_lens", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["B", 1]))
    same = ir.node("Identity", [logits])
    same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = "logits", logits.type, logits.shape
    graph = ir.Graph([logits, kv_lens], same.outputs, nodes=[same], opset_imports={"": 23}, name="g")
    model = ir.Model(graph, ir_version=10)
    attach_paged_attention(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    rows[1, 7] = np.nan
    rows[2] = np.nan
    rows[3, 4], rows[4, 5] = np.inf, -np.inf
    rows[5, [8, 30]] = 9.0
    assert [value.name for value in model.graph.inputs] == ["logits_in"], "without attention there is no cache"
    (ids,) = session.run(["token_ids"], {"logits_in": rows})
    assert ids.dtype == np.int64
    assert ids.tolist() == [int(rows[0].argmax()), -1, -1, 4, int(rows[4].argmax()), 8]


@pytest.mark.parametrize(("name", "dtype"), ENGINES)
def test_executor_and_graph_together_equal_eager_transformers(name, dtype, tmp_path, monkeypatch):
    check_engine(name, dtype, tmp_path, cuda_graphs=False, fake=monkeypatch)


def test_int4_weights_and_fused_layers_give_the_logits_of_what_they_stand_for(tmp_path, monkeypatch):
    check_engine("llama", "float16", tmp_path, cuda_graphs=False, int4=True, fuse=True, fake=monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "cuda_graphs", "int4", "fuse"),
    [
        ("llama", False, False, False), ("deepseek_v3", False, False, False), ("deepseek_v3", True, False, False),
        ("llama", False, True, False), ("llama", False, True, True), ("llama", True, False, True),
        ("qwen3_moe", True, False, True),
    ],
)  # fmt: skip
def test_a_gpu_gives_the_logits_of_what_the_graph_stands_for(name, dtype, cuda_graphs, int4, fuse, tmp_path):
    gpu_or_skip()
    check_engine(name, dtype, tmp_path, cuda_graphs=cuda_graphs, int4=int4, fuse=fuse)


def quantize(model: ir.Model) -> None:
    """What a build with ``--quantize int4`` adds to the passes."""
    for item in quantizing_passes("int4", "ort-cuda"):
        item(model)


def round_weights(model: Any, dtype: str) -> None:
    """Give linear layers the values that their codes stand for."""
    rounded = ir.DataType[dtype.upper()].numpy()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            packed, scales = pack_channels(module.weight.detach().numpy(), 32, rounded)
            codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], 32)
            values = ((codes.astype(np.float32) - 8) * scales[..., None]).reshape(len(packed), -1)
            module.weight = torch.nn.Parameter(torch.tensor(values[:, : module.in_features]), requires_grad=False)


def entry_of(dtype: str, layers: Any, inputs: tuple[str, ...] = tuple(STEP[:-2])) -> ModelEntry:
    return make_entry(backend="ort-cuda", dtype=dtype, vocab_size=VOCAB, layers=tuple(layers), inputs=inputs)


def check_engine(name, dtype, tmp_path, *, cuda_graphs, int4=False, fuse=False, fake=None):
    """Ragged steps on rows that were moved and copied, over the end of a block, against exact arithmetic."""
    result, checkpoint = traced(name, dtype, pack=fuse)
    model = result.ir_model.clone()
    if int4:
        quantize(model)
    if fuse:
        assert fuse_for_paging(model, 310, None) == len(result.layers)
    lower_ort_cuda(model)
    if fuse:
        assert fuse_norms(model) == 2 * len(result.layers)
    ir.save(model, tmp_path / "model.onnx")
    done = [9, 250 if name == "llama" else 30, 40]
    texts = [np.random.default_rng(row).integers(3, VOCAB, done[row] + 18).tolist() for row in range(3)]
    # The same rounded weights, exact arithmetic.
    checkpoint = dataclasses.replace(checkpoint, model=copy.deepcopy(checkpoint.model).float(), dtype="float32")
    if int4:
        round_weights(checkpoint.model, dtype)
    expected = compute_reference_logits(checkpoint, texts)
    entry = entry_of(dtype, result.layers, step_inputs(model))
    if fake is not None:
        FakeOrt(lambda _, path: ReferenceSession(path)).install(fake)
    executor = OrtCudaExecutor(tmp_path / "model.onnx", entry, num_rows=4, kv_capacity=310, cuda_graphs=cuda_graphs)
    executor.capture([StepShape(0, 3, 15, 5, 15), StepShape(0, 3, 3, 1, 3)])
    runner = ModelRunner(executor)
    for row, past in enumerate(done):
        runner.prefill(row + 1, texts[row][:past])
    runner.move_row(1, 0)
    executor.copy_row(2, 1, done[1])
    executor.swap_rows(1, 2, (done[1], done[1]))  # the copy is read from here on
    tolerance = {"float16": 0.01, "bfloat16": 0.06}[dtype] * max(float(np.abs(logits).max()) for logits in expected)
    order = (0, 2, 1)
    runner.move_row(3, 1)
    for new in (5, 5, 1, 1, 5, 1):  # the second text goes over into its second block
        work = [RowWork(texts[text][done[text] : done[text] + new], new) for text in order]
        logits = runner.step(0, work).copy()
        ids = runner.step(0, work, want="token_ids")
        for place, text in enumerate(order):
            got = logits[place * new : (place + 1) * new]
            assert np.abs(got - expected[text][done[text] : done[text] + new]).max() < tolerance
            assert ids[place * new : (place + 1) * new].tolist() == got.argmax(axis=1).tolist()
            done[text] += new
            runner.kv.commit(place, done[text])
    found, tokens = [], [5, 6, 7]
    for _ in range(4):
        found.append(runner.step(0, [RowWork([token], 1) for token in tokens], want="token_ids").tolist())
        tokens = found[-1]
        for place in range(3):
            runner.kv.commit(place, runner.kv.kv_len(place) + 1)
    for place, text in enumerate(order):
        runner.kv.commit(place, done[text])
    chained = runner.chain(0, [RowWork([token], 1) for token in (5, 6, 7)], [()] * 4)
    assert [rows.token_ids for rows in chained] == found, "steps that follow each other on the device"
    executor.close()


@pytest.mark.parametrize(("name", "dtype"), ENGINES)
def test_a_row_for_each_token_gives_the_same_logits(name, dtype, tmp_path, monkeypatch):
    """Ragged rows beside rows of one token and idle ones, over the end of a block, before and after a row is moved."""
    result, _ = traced(name, dtype)
    monkeypatch.delenv(CUDNN_SWITCH, raising=False)
    FakeOrt(lambda _, path: ReferenceSession(path)).install(monkeypatch)
    model = result.ir_model.clone()
    lower_ort_cuda(model)
    ir.save(model, tmp_path / "model.onnx")
    random = np.random.default_rng(2)
    texts = [random.integers(3, VOCAB, count).tolist() for count in (9, 254, 4)]
    steps = [
        [RowWork(random.integers(3, VOCAB, new).tolist(), new) if new else IDLE for new in news]
        for news in ((5, 3, 1), (1, 4, 0), (2, 0, 0), (3, 5, 4))
    ]
    found = []
    for capability in (89, 90):
        monkeypatch.setattr(ort_cuda, "compute_capability", lambda device_id, answer=capability: answer)
        path, entry = tmp_path / "model.onnx", entry_of(dtype, result.layers)
        executor = OrtCudaExecutor(path, entry, num_rows=4, kv_capacity=310)
        assert executor.splits_rows == (capability == 90)
        runner = ModelRunner(executor)
        for row, text in zip((0, 1, 3), texts, strict=True):
            runner.prefill(row, text)
        runner.move_row(3, 2)
        found.append([])
        for work in steps:
            found[-1].append(runner.step(0, work).copy())
            for row, given in enumerate(work):
                runner.kv.commit(row, runner.kv.kv_len(row) + max(0, len(given.tokens) - 1))
    for split, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(split, whole)


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_operators_get_types_that_they_take(name: str) -> None:
    """TopK takes no bfloat16, which ONNX Runtime says when it loads an engine, on somebody's GPU."""
    result, _ = traced(name, "bfloat16")
    model = result.ir_model.clone()
    chosen = [node.outputs[0].dtype for node in model.graph if node.op_type == "TopK"]
    lower_ort_cuda(model)
    proto = ir.to_proto(model)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    assert chosen
    assert {node.inputs[0].dtype for node in model.graph if node.op_type == "TopK"} == {ir.DataType.FLOAT}
