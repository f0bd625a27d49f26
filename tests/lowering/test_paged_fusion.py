"""The paged graph with joined layers, rotation and head norms in its kernel, and joined norms: logits and nodes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from specexport.backends.cuda_kernels import _load_kernels, check_kernels, find_missing_kernels
from specexport.lowering.fuse import fuse_norms
from specexport.lowering.ort_cuda import attach_paged_attention, replace_uneven_splits
from specexport.onnx_emit import constant
from specexport.passes.pipeline import default_passes, run_passes
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import UnsupportedModelError
from tests.support.cases import chance
from tests.support.models.half_models import load
from tests.support.models.tiny_models import ARCHITECTURES, VOCAB, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.cuda_graphs import PagedEngine, gpu_or_skip
from tests.support.references.engine_harness import make_checkpoint, pack
from tests.support.references.lowered import fuse_for_paging, lower_ort_cuda

PASTS, NEWS = (9, 17, 4), (5, 1, 3)
OWN = {
    "phi_partial": ("Phi", ARCHITECTURES["phi"][1] | {"hidden_size": 128}),
    "qwen3_wide": ("Qwen3", ARCHITECTURES["qwen3"][1] | {"head_dim": 32}),
}
EXPECTED = {
    # Attention nodes that rotate, those that normalize heads, those with q, k and v as one; additions joined.
    "llama": (2, 0, 2, 4),
    "llama_rope_yarn": (2, 0, 2, 4),
    "qwen2": (2, 0, 2, 4),
    "qwen3_wide": (2, 2, 2, 4),
    "qwen3": (0, 0, 0, 4),  # heads of 24: no kernel rotates them
    "cohere2": (1, 0, 2, 0),  # neighbours are pairs, and one layer in two rotates
    "gemma2": (2, 0, 2, 4),
    "gemma3": (2, 2, 2, 4),
    "phi_partial": (2, 0, 2, 2),
    "gpt_oss": (2, 0, 2, 4),
    "deepseek_v3": (0, 0, 0, 4),  # the last channels of a head rotate, and keys are wider than values
}


def fused(model: Any, *, lower: Any = attach_paged_attention) -> tuple[ir.Model, Any, int]:
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes("float32", pack=True))
    fuse_for_paging(traced.ir_model, 64, None)
    lower(traced.ir_model)
    return traced.ir_model, traced.layers, fuse_norms(traced.ir_model)


OFTEN = {"llama", "phi_partial", "gpt_oss", "gemma3"}


def with_marks(names: Iterable[str], often: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in often else pytest.mark.whole) for name in names]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", with_marks(EXPECTED, OFTEN))
def test_logits_equal_eager_transformers(name: str) -> None:
    model = make_model(*OWN[name]) if name in OWN else tiny_model(name)
    graph, layers, joined = fused(model)
    nodes = [node for node in graph.graph if node.op_type == "PagedAttention"]
    rotating = sum(node.attributes.get_int("do_rotary", 0) for node in nodes)
    normed = sum(node.inputs[12] is not None for node in nodes)
    assert (rotating, normed, sum(node.inputs[1] is None for node in nodes), joined) == EXPECTED[name]
    random = np.random.default_rng(chance.seed(7))
    texts = [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PASTS, NEWS, strict=True)]
    expected = compute_reference_logits(make_checkpoint(model), texts)
    wanted = np.concatenate([logits[past:] for logits, past in zip(expected, PASTS, strict=True)])
    for by_token in (False, True):
        engine = PagedEngine(ir.to_proto(graph), layers, num_rows=4)
        engine.run(pack([text[:past] for text, past in zip(texts, PASTS, strict=True)], (0, 0, 0)), first_row=1)
        step = pack([text[past:] for text, past in zip(texts, PASTS, strict=True)], PASTS)
        outputs = engine.run(step, first_row=1, row_for_each=by_token)
        assert np.abs(outputs["logits"] - wanted).max() < 1e-4
        np.testing.assert_array_equal(outputs["token_ids"], wanted.argmax(axis=1))


REFUSED = {"bloom", "mpt", "gptj", "codegen"}
"""ALiBi, and tables of positions that stay in float32 in a model of 16 bits."""


@pytest.mark.parametrize("name", with_marks([*sorted(ARCHITECTURES.keys() - REFUSED), *OWN], {"gemma3", "gpt_oss"}))
def test_every_architecture_stays_within_the_kernels_and_fusions_leave_fewer_nodes(name: str) -> None:
    model, lengths = load(OWN[name] if name in OWN else ARCHITECTURES[name], "bfloat16"), []
    for fuse in (False, True):
        traced = trace_of(model)
        run_passes(traced.ir_model, default_passes("bfloat16", pack=fuse))
        if fuse:
            fuse_for_paging(traced.ir_model, 64, None)
        lower_ort_cuda(traced.ir_model)
        if fuse:
            fuse_norms(traced.ir_model)
        lengths.append(len(traced.ir_model.graph))
        assert list(find_missing_kernels(traced.ir_model)) == []
        onnx.checker.check_model(ir.to_proto(traced.ir_model))
    assert lengths[1] < lengths[0]


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape([2]))
    nodes = [ir.node("Swish", [x]), ir.node("Sigmoid", [x]), ir.node("BiasAdd2", [x], domain="com.microsoft")]
    opsets = {"": 24, "com.microsoft": 1}
    graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports=opsets, name="g")
    with pytest.raises(
        UnsupportedModelError, match=r"for ai.onnx.Swish \(24\), com.microsoft.BiasAdd2 \(1\)"
    ) as caught:
        check_kernels(ir.Model(graph, ir_version=10))
    assert "ort-cpu" in str(caught.value)


def test_a_type_without_a_kernel_is_refused_by_the_operators_name() -> None:
    wide, narrow = (
        ir.Value(name=f"x{dtype}", type=ir.TensorType(dtype), shape=ir.Shape([2, 2]))
        for dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16)
    )
    nodes = [
        ir.node("ArgMax", [wide]),  # has kernels for both, and for neither of the next two
        ir.node("ArgMax", [narrow]),
        ir.node("PagedAttention", [wide, None, None, wide], domain="com.microsoft"),
        ir.node("Concat", [narrow, narrow], {"axis": 0}),  # its types could not be read
    ]
    opsets = {"": 23, "com.microsoft": 1}
    graph = ir.Graph([wide, narrow], [], nodes=nodes, opset_imports=opsets, name="g")
    with pytest.raises(UnsupportedModelError) as caught:
        check_kernels(ir.Model(graph, ir_version=10))
    text = "CUDA kernel for ai.onnx.ArgMax (13) of bfloat16, com.microsoft.PagedAttention (1) of float32."
    assert text in str(caught.value)
    assert "another dtype" in str(caught.value)


@pytest.mark.parametrize(("sizes", "left"), [([8, 8], 0), ([8, 4, 4], 0), ([16 - 4, 4], 1), ([4, 4, 2, 6], 1)])
def test_splits_that_a_cuda_graph_cannot_hold_become_slices(sizes: list[int], left: int) -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3, 16]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 23}, name="g")
    given = constant(graph, "sizes", np.array(sizes))
    node = ir.node("Split", [x, given], {"axis": -1}, num_outputs=len(sizes))
    graph.append(node)
    for at, value in enumerate(node.outputs):
        value.name, value.type = f"y{at}", x.type
        graph.outputs.append(value)
    model = ir.Model(graph, ir_version=10)
    assert replace_uneven_splits(model) == left
    array = np.arange(48, dtype=np.float32).reshape(3, 16)
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": array})
    for part, expected in zip(found, np.split(array, np.cumsum(sizes)[:-1], axis=1), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.gpu
def test_the_table_of_kernels_is_what_onnxruntime_has() -> None:
    gpu_or_skip()
    theirs: set[tuple[str, int, int]] = set()
    for kernel in ort_state.get_all_opkernel_def():
        if kernel.provider == "CUDAExecutionProvider" and kernel.domain in ("", "com.microsoft"):
            first, last = kernel.version_range
            theirs.add((f"{kernel.domain}:{kernel.op_name}", first, 0 if last >= 2**31 - 1 else last))
    ours = {(name, *versions) for name, kernels in _load_kernels().items() for *versions, _types in kernels}
    assert ours == theirs
