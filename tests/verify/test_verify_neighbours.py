"""The neighbours part: steps that treat each token alone pass, one scale for a whole step does not."""

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from specexport.passes.block_format import unpack
from specexport.verify.logits import check_neighbours, make_sequences
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.ort import OrtExecutor
from tests.support.fakes.verify_fakes import LOOKAHEAD, MAX_MODEL_LEN, PROMPTS, VOCAB, make_executor


def quantize_activations(source: Path, folder: Path, *, each_token: bool) -> Path:
    """Writes a copy of a lowered graph whose linear layers take int8 weights, and int8 activations scaled as told."""
    model = onnx.load(source)
    weights = {item.name: item for item in model.graph.initializer}
    made: dict[str, tuple[str, str]] = {}

    def quantized(name: str, kind: str, n: int, k: int) -> tuple[str, str]:
        if name not in made:
            values = unpack(kind, numpy_helper.to_array(weights[name]), n, k).T
            scale = np.abs(values).max(axis=0) / 127
            whole = np.round(values / scale).astype(np.int8)
            made[name] = (f"{name}.int8", f"{name}.scale")
            model.graph.initializer.append(numpy_helper.from_array(whole, made[name][0]))
            model.graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), made[name][1]))
        return made[name]

    def rewrite(graph: onnx.GraphProto) -> None:
        nodes = []
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rewrite(attribute.g)
            if node.op_type != "BlockLinear":
                nodes.append(node)
                continue
            told = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            given, out = node.input[0], node.output[0]
            assert len(node.input) == 2, "the demo target has no biases"
            weight, scale = quantized(node.input[1], told["format"].decode(), told["N"], told["K"])
            make = onnx.helper.make_node
            nodes += [
                make("Abs", [given], [f"{out}.abs"]),
                make("ReduceMax", [f"{out}.abs", "axes.last"] if each_token else [f"{out}.abs"], [f"{out}.max"]),
                make("Mul", [f"{out}.max", "step"], [f"{out}.xs"]),
                make("Div", [given, f"{out}.xs"], [f"{out}.scaled"]),
                make("Round", [f"{out}.scaled"], [f"{out}.whole"]),
                make("Cast", [f"{out}.whole"], [f"{out}.x"], to=onnx.TensorProto.INT8),
                make("MatMulInteger", [f"{out}.x", weight], [f"{out}.sum"]),
                make("Cast", [f"{out}.sum"], [f"{out}.float"], to=onnx.TensorProto.FLOAT),
                make("Mul", [f"{out}.xs", scale], [f"{out}.scales"]),
                make("Mul", [f"{out}.float", f"{out}.scales"], [out]),
            ]
        del graph.node[:]
        graph.node.extend(nodes)

    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "axes.last"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1 / 127, np.float32), "step"))
    rewrite(model.graph)
    assert made, "no linear layer was found"
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


def check(executor, lookahead=LOOKAHEAD, **options):
    sequences = make_sequences(PROMPTS, VOCAB, lookahead=lookahead, max_model_len=MAX_MODEL_LEN)
    result = check_neighbours("target", executor, sequences, lookahead=lookahead, **options)
    return result, {case.name for case in result.cases if not case.passed}


def test_a_right_engine_passes_in_every_company():
    executor = make_executor()
    result, _ = check(executor)
    assert result.passed
    assert result.max_relative == 0.0
    assert [case.name for case in result.cases] == [
        *(f"{width} at a time" for width in (2, 3, 4, 5)),
        "5 at a time after pieces of 7",
        "1 at a time beside 3 other rows",
        "5 at a time beside 3 other rows",
    ]
    assert {(case.rows, case.same_bits) for case in result.cases} == {(12, 12)}
    assert {shape.num_seqs for shape in executor.calls} == {1, 4}
    assert sum(shape.num_seqs == 1 and shape.num_tokens == 1 for shape in executor.calls) == 12
    for lookahead in (1, 2):  # for which short sequences are long enough
        assert check(make_executor(), lookahead)[0].passed
    for sequences in ([], [[1, 2]]):
        with pytest.raises(InvalidRequestError, match="3 tokens"):
            check_neighbours("target", make_executor(), sequences, lookahead=2)


class Changed(FakeExecutor):
    def __init__(self, *sizes, change):
        super().__init__(*sizes)
        self.change = change

    def execute(self, want="logits"):
        return self.change(self, super().execute().copy())


def rounded(axis):
    """To 255 steps of the largest logit along an axis."""

    def change(_executor, logits):
        scale = np.abs(logits).max(axis=axis, keepdims=True) / 127
        return np.round(logits / scale).astype(np.float32) * scale

    return change


def test_one_scale_a_step_fails_and_one_a_token_passes_and_nan_everywhere_fails():
    assert check(make_executor(Changed, change=rounded(1)))[0].passed
    result, failed = check(make_executor(Changed, change=rounded(None)))
    assert not result.passed
    assert failed == {case.name for case in result.cases}
    assert not check(make_executor(Changed, change=lambda _, logits: logits * np.float32(math.nan)))[0].passed


@pytest.mark.parametrize(
    ("tolerance", "offset", "passed"),
    [(0.0, 1e-6, False), (1e-5, 1e-6, True), (1e-5, 0.5, False), (1e-5, math.nan, False), (0.0, math.inf, False)],
)
def test_what_other_rows_change_is_seen(tolerance, offset, passed):
    def change(executor, logits):
        logits[0, 3] += offset if executor.calls[-1].num_seqs > 1 else 0
        return logits

    result, failed = check(make_executor(Changed, change=change), tolerance=tolerance)
    assert result.passed == passed
    assert sum(case.rows - case.same_bits for case in result.cases) > 0
    assert failed == (set() if passed else {f"{n} at a time beside 3 other rows" for n in (1, 5)})


@pytest.mark.parametrize("each_token", [pytest.param(True, marks=pytest.mark.whole), False])
def test_a_real_graph_with_one_scale_a_step_fails(demo_bundle, tmp_path, each_token):
    entry = load_manifest(demo_bundle).models["target"]
    path = quantize_activations(demo_bundle / entry.engine.path, tmp_path / "quantized", each_token=each_token)
    executor = OrtExecutor(path, entry, num_rows=4, kv_capacity=160, num_threads=1, spin=False)
    texts = [[265, 300, 411, 17, 1200, 873, 90, 3000], [5, 77, 4001, 2222, 361]]
    sequences = make_sequences(texts, entry.vocab_size, lookahead=4, max_model_len=128)
    result = check_neighbours("target", executor, sequences, lookahead=4)
    executor.close()
    assert {case.passed for case in result.cases} == {each_token}


def test_one_bit_that_the_cut_of_the_prompt_changes_is_seen():
    """A difference of nothing, in value: zeros get a sign if the prompt was cut before token 7."""

    def change(executor, logits):
        logits[:, 2] = -0.0 if any(shape.num_tokens == 7 for shape in executor.calls) else 0.0
        return logits

    result, _ = check(make_executor(Changed, change=change))
    assert not result.passed
    assert result.max_relative == 0.0
    assert next(case for case in result.cases if "pieces" in case.name).same_bits == 0
    assert check(make_executor(Changed, change=change), tolerance=1e-5)[0].passed
