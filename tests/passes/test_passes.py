"""Each pass on a real trace: what it changes, what it leaves alone, and that weights are stored once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specexport.onnx_emit import part_of
from specexport.passes import clean_up
from specexport.passes.base import find_constant
from specexport.passes.linear_flatten import LinearFlattenPass
from specexport.passes.logit_row_select import LogitRowSelectPass
from specexport.passes.pipeline import default_passes, run_passes
from specexport.passes.precision_cast import PrecisionCastPass
from specexport.passes.transpose_fold import TransposeFoldPass
from tests.support.models.quantized import add_weight
from tests.support.models.tiny_models import VOCAB
from tests.support.references.engine_harness import pack
from tests.support.references.lowered import lower_ort_cpu
from tests.support.references.sessions import session_of

Traced = Callable[[str], Any]


def count(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def find_weights(model: ir.Model, shape: tuple[int, ...]) -> list[str]:
    values = model.graph.initializers.values()
    return [str(v.name) for v in values if v.const_value is not None and tuple(v.const_value.shape) == shape]


def test_passes_run_in_order_and_are_reported(traced: Traced) -> None:
    passes = default_passes("float32")
    seen: list[str] = []
    report = run_passes(traced("llama"), passes, on_pass=seen.append)
    assert seen == [name for name, _ in report] == [item.name for item in passes]


def test_what_the_passes_do_to_a_tied_llama(traced: Traced) -> None:
    model = traced("llama_tied")
    report = dict(run_passes(model, default_passes("float32")))
    # Per layer 2 norms and 2 rotary embeddings, and the last norm; 7 linear weights a layer; the head in one Gemm.
    assert (report["operator-fuse"], report["transpose-fold"], report["logit-row-select"]) == (9, 14, 1)
    counts = count(model)
    assert (counts["RMSNormalization"], counts["RotaryEmbedding"], counts["Gemm"]) == (5, 4, 1)
    assert (counts["Cos"], counts["Sin"], counts["UnpaddedAttention"]) == (1, 1, 2)
    assert not find_weights(model, (64, VOCAB))
    assert len(find_weights(model, (VOCAB, 64))) == 1


def test_a_dump_shows_the_graph_after_each_pass_without_weights(traced: Traced, tmp_path: Path) -> None:
    model = traced("llama")
    run_passes(model, default_passes("float32"), dump_dir=tmp_path)
    stems = [f"{i:02d}-{name}" for i, name in enumerate(["traced", *(item.name for item in default_passes("float32"))])]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        stem + end for stem in stems for end in (".onnx", ".txt")
    )
    last = onnx.load(tmp_path / f"{stems[-1]}.onnx", load_external_data=False)
    assert [node.op_type for node in last.graph.node] == [node.op_type for node in model.graph]
    assert (tmp_path / f"{stems[-1]}.onnx").stat().st_size < 100_000
    assert "UnpaddedAttention" in (tmp_path / f"{stems[0]}.txt").read_text()
    assert all(
        v.const_value is not None and v.const_value.numpy() is not None for v in model.graph.initializers.values()
    )


def test_equal_weights_become_one_and_nearly_equal_ones_do_not(traced: Traced) -> None:
    model = traced("llama")
    data = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    near = data.copy()
    near[7, 3] = np.nextafter(near[7, 3], 9)  # one bit, where the sparse sample does not look
    sinks = []
    for name, weight in (("a", data), ("b", data.copy()), ("c", near), ("d", data.astype(np.float64))):
        node = ir.node("Identity", [add_weight(model, name, weight)])
        model.graph.append(node)
        sinks.append(node)
    before = len(model.graph.initializers)
    assert clean_up.WeightDeduplicatePass()(model).modified
    assert sinks[0].inputs[0] is sinks[1].inputs[0]
    assert len({id(node.inputs[0]) for node in sinks}) == 3
    assert "b" not in model.graph.initializers
    assert len(model.graph.initializers) < before


def test_transposes_fold_lazily_and_not_where_the_weight_is_shared(traced: Traced) -> None:
    model = traced("llama_tied")
    clean_up.ConstantFoldPass()(model)
    head = "model.lm_head.weight"
    originals = {
        name: v.const_value.numpy() for name, v in model.graph.initializers.items() if len(v.const_value.shape) == 2
    }
    folding = TransposeFoldPass()
    folding(model)
    assert folding.changes == 14
    assert head in model.graph.initializers, "the tied embedding is read untransposed too"
    folded = {n: v for n, v in model.graph.initializers.items() if n.endswith(".transposed")}
    assert len(folded) == 14
    for name, value in folded.items():
        assert isinstance(value.const_value, ir.LazyTensor)
        np.testing.assert_array_equal(value.const_value.numpy(), originals[name.removesuffix(".transposed")].T)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_shared_weight_behind_a_transpose_is_a_linear_layer_and_stored_once(quantize, traced):
    """As of models whose tied LM head has layers before it: no pass selects the rows of those."""
    model = traced("llama_tied")
    passes = default_passes("float32", quantize=quantize, own_operators=True)
    run_passes(model, [item for item in passes if not isinstance(item, LogitRowSelectPass)])
    readers = [node for node in model.graph if node.op_type in ("BlockLinear", "BlockEmbedding")]
    (head,) = [node for node in readers if node.op_type == "BlockLinear" and node.attributes["N"].as_int() == VOCAB]
    (lookup,) = [node for node in readers if node.op_type == "BlockEmbedding"]
    assert head.inputs[1] is lookup.inputs[1]
    assert not any(node.op_type in ("MatMul", "Gemm") for node in model.graph)


@pytest.mark.parametrize("also_whole", [False, True])
def test_layers_of_a_stack_become_weights_of_their_own(also_whole: bool) -> None:
    stack = np.random.default_rng(0).standard_normal((4, 12, 10)).astype(np.float32)
    nodes = " ".join(f"w{i} = Gather (stack, i{i}) y{i} = MatMul (x, w{i})" for i in range(4))
    outputs = ", ".join(f"float[T, 10] y{i}" for i in range(4))
    text = f"""<ir_version: 10, opset_import: ["": 23]> g (float[T, 12] x) => ({outputs}, float[a] z) {{
        {nodes} z = Identity ({"stack" if also_whole else "x"})
    }}"""
    entries = [ir.tensor(np.array(i), name=f"i{i}") for i in range(4)]
    model = ir.from_onnx_text(text, initializers=[ir.tensor(stack, name="stack"), *entries])
    folding = clean_up.SelectFoldPass()
    folding(model)
    assert folding.changes == (0 if also_whole else 4)
    assert ("stack" in model.graph.initializers) == also_whole
    for i in range(0 if also_whole else 4):
        tensor = model.graph.initializers[f"stack.{i}"].const_value
        assert isinstance(tensor, ir.LazyTensor)
        np.testing.assert_array_equal(tensor.numpy(), stack[i])
        np.testing.assert_array_equal(part_of(tensor, 1, 3, 9), stack[i][:, 3:9])


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "phi", "gemma2", "granite", "cohere2", "mixtral", "gpt_oss"])
def test_the_head_is_one_gemm_over_the_stored_weight(name: str, traced: Traced) -> None:
    model = traced(name)
    clean_up.ConstantFoldPass()(model)
    assert LogitRowSelectPass()(model).modified
    (gemm,) = [node for node in model.graph if node.op_type == "Gemm" and node.outputs[0].shape[0] == "num_logit_rows"]
    assert gemm.attributes["transB"].as_int() == 1
    assert gemm.inputs[1].const_value.shape[0] == VOCAB
    assert len(gemm.inputs[0].shape) == 2
    # Only the rows that are wanted: the Gemm reads a Gather of logit_rows.
    gather = gemm.inputs[0].producer()
    while gather.op_type != "Gather":
        gather = gather.inputs[0].producer()
    assert gather.inputs[1].name == "logit_rows"


def test_an_unexpected_tail_is_left_as_it_is(traced: Traced) -> None:
    model = traced("llama")
    clean_up.ConstantFoldPass()(model)
    matmul = next(v for v in model.graph.outputs if v.name == "logits").producer().inputs[0].producer()
    matmul.op_type = "Einsum"
    selecting = LogitRowSelectPass()
    assert not selecting(model).modified
    assert selecting.changes == 0


def test_constant_folding_never_copies_a_weight_matrix(traced: Traced) -> None:
    model = traced("llama")
    matrices = {n for n, v in model.graph.initializers.items() if v.const_value.size > 1024}
    nodes = len(model.graph)
    folding = clean_up.ConstantFoldPass()
    folding(model)
    assert folding.changes == nodes - len(model.graph) > 0
    after = {n for n, v in model.graph.initializers.items() if v.const_value.size > 1024}
    assert after <= matrices
    assert not clean_up.ConstantFoldPass()(model).modified, "a second run has nothing left to do"


def test_fusing_and_merging_count_what_they_change(traced: Traced) -> None:
    model = traced("llama")
    clean_up.ConstantFoldPass()(model)
    before = count(model)
    fusing = clean_up.OperatorFusePass()
    fusing(model)
    assert fusing.changes == count(model)["RMSNormalization"] + count(model)["RotaryEmbedding"] == 9
    merging = clean_up.NodeDeduplicatePass()
    nodes = len(model.graph)
    merging(model)
    assert merging.changes == nodes - len(model.graph) > 0
    assert before["MatMul"] == count(model)["MatMul"]


def test_weights_without_readers_go(traced: Traced) -> None:
    model = traced("llama")
    add_weight(model, "orphan", np.ones(3, np.float32))
    dead = ir.node("Neg", [add_weight(model, "dead", np.ones(3, np.float32))])
    model.graph.append(dead)
    names = set(model.graph.initializers)
    removing = clean_up.WeightRemovePass()
    removing(model)
    assert {"orphan", "dead"} <= names - set(model.graph.initializers)
    assert removing.changes == len(names) - len(model.graph.initializers)


def test_casts_on_weights_happen_at_build_time(traced: Traced) -> None:
    model = traced("llama")
    data = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float16)
    cast = ir.node("Cast", [add_weight(model, "half", data)], attributes={"to": int(ir.DataType.FLOAT)})
    reader = ir.node("Neg", [cast.outputs[0]])
    model.graph.extend([cast, reader])
    casting = PrecisionCastPass("float32")
    casting(model)
    assert casting.changes >= 1
    assert reader.inputs[0].const_value.dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(reader.inputs[0].const_value.numpy(), data.astype(np.float32))
    assert "half" not in model.graph.initializers


def test_every_linear_layer_becomes_a_product_of_two_matrices(traced: Traced) -> None:
    """With the same logits; products of activations by each other stay."""
    model = traced("llama_tied")
    run_passes(model, default_passes("float32"))
    flat, before = model.clone(), count(model)["MatMul"]
    flattening = LinearFlattenPass()
    flattening(flat)
    assert count(flat)["MatMul"] == before - flattening.changes < before
    weights = [find_constant(node.inputs[1]) for node in flat.graph if node.op_type == "MatMul"]
    assert not [weight for weight in weights if weight is not None and len(weight.shape) == 2]
    found = []
    for each in (model, flat):
        lower_ort_cpu(each)
        session = session_of(each)
        feeds = pack([[3, 4, 5, 60], [6, 7]], [0, 0])
        caches = {x.name: np.zeros((2, 1, 2, 8, 16), np.float32) for x in session.get_inputs() if "cache" in x.name}
        wanted = {value.name for value in session.get_inputs()}
        found.append(session.run(["logits"], {k: v for k, v in (feeds | caches).items() if k in wanted})[0])
    assert np.isfinite(found[0]).all()
    np.testing.assert_allclose(*found, atol=2e-5)
