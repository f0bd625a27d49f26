"""The fused graph, against eager transformers: packed layers, rotation in the attention kernel, joined norms."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.backends.ort import write_onnx, write_padded_onnx
from specexport.lowering.fuse import fuse_norms, fuse_rotary, rotary_rows
from specexport.passes.pipeline import default_passes, run_passes
from specexport.trace.check import compute_reference_logits
from tests.support.cases import chance
from tests.support.models.tiny_models import BASE, VOCAB, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine, make_checkpoint
from tests.support.references.lowered import lower_ort_cpu

PREFILL = (9, 17, 4)
VERIFY = (5, 1, 3)
ROWS = 64
WIDE = {"hidden_size": 128, "partial_rotary_factor": 0.5}
PARTIAL = {"phi_partial": ("Phi", BASE | WIDE)}
EXPECTED = {
    # Linear layers joined, attention nodes that rotate, additions joined, and how: rotation, and q, k and v as one.
    "llama_rope_yarn": (10, 2, 4, ("half", 1)),
    "gemma2": (10, 2, 4, ("half", 1)),
    "gemma3": (10, 2, 4, ("half", 0)),
    "gpt_oss": (6, 2, 4, ("half", 1)),
    "cohere2": (10, 1, 0, ("interleaved", 1)),
    "phi_partial": (6, 2, 2, ("half", 1)),
    "gpt2": (0, 0, 5, ("", 1)),
}
"""Window, softcap, sinks, experts, scaled and partial and interleaved rotation, norms on q and k, learned positions."""


class Fused:
    def __init__(self, model: Any, folder: Path, rows: int = ROWS) -> None:
        traced = trace_of(model)
        self.folder, self.layers, self.graph = folder, traced.layers, traced.ir_model
        packed = dict(run_passes(self.graph, default_passes("float32", pack=True, own_operators=True)))["linear-pack"]
        padded = self.graph.clone()
        rotated = fuse_rotary(self.graph, rows)
        lower_ort_cpu(self.graph)
        self.counts = packed, rotated, fuse_norms(self.graph)
        write_onnx(self.graph, folder)
        lower_ort_cpu(padded, padded_kv=True)
        write_padded_onnx(padded, folder)

    def engine(self, num_rows: int, capacity: int = 40, **options: Any) -> Engine:
        return Engine(self.folder, self.layers, num_rows=num_rows, capacity=capacity, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Fused:
    return Fused(tiny_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", EXPECTED)
def test_fused_logits_equal_eager_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(*PARTIAL[name]) if name in PARTIAL else tiny_model(name)
    random = np.random.default_rng(chance.seed(7))
    sequences = [random.integers(3, VOCAB, past + max(VERIFY)).tolist() for past in PREFILL]
    expected = compute_reference_logits(make_checkpoint(model), sequences)
    fused = Fused(model, tmp_path)
    assert fused.counts == EXPECTED[name][:3]
    nodes = [node for node in fused.graph.graph if node.op_type == "UnpaddedAttention"]
    assert EXPECTED[name][3] in {(n.attributes["rotary"].as_string(), n.attributes["packed"].as_int()) for n in nodes}
    for graph in ("model.onnx", "model.padded.onnx"):
        held = None if graph == "model.onnx" else [list(range(past)) for past in PREFILL]
        engine = fused.engine(3, graph=graph, poison=np.nan if held is None else 0.0)
        for row, past in enumerate(PREFILL):
            logits = engine.step([sequences[row][:past]], [0], row, None if held is None else [[]])
            assert np.abs(logits - expected[row][:past]).max() < 1e-4
        spans = [slice(past, past + new) for past, new in zip(PREFILL, VERIFY, strict=True)]
        verify = engine.step([ids[span] for ids, span in zip(sequences, spans, strict=True)], PREFILL, 0, held)
        wanted = np.concatenate([logits[span] for logits, span in zip(expected, spans, strict=True)])
        assert np.abs(verify - wanted).max() < 1e-4, graph


def test_positions_are_what_the_operator_counts(llama: Fused) -> None:
    names = [value.name for value in llama.graph.graph.inputs]
    assert "positions" not in names, "nothing reads them once the operator rotates"
    counts = Counter(node.op_type for node in llama.graph.graph)
    assert not counts.keys() & {"RotaryEmbedding", "Transpose", "Split", "Cos", "Sin", "Add"} - {"Split"}
    assert counts["Split"] == 2, "gate and up; q, k and v go to the operator as they are"


def test_a_position_beyond_the_tables_is_an_error_not_a_wrong_answer(llama: Fused) -> None:
    engine = llama.engine(1, 80)
    engine.step([list(range(3, 3 + ROWS))], [0])
    with pytest.raises(Exception, match="beyond the rotary tables"):
        engine.step([[5]], [ROWS])


def test_tables_that_are_large_for_their_model_are_not_made() -> None:
    graph = trace_of(tiny_model("llama")).ir_model
    run_passes(graph, default_passes("float32", pack=True))
    assert fuse_rotary(graph.clone(), 2**16) == 0, "two tables of 2 MiB each, for a model of half a megabyte"
    assert fuse_rotary(graph, 2**10) == 2


@pytest.mark.parametrize("spoil", ["scale", "shift", "second side"])
def test_what_is_no_plain_rotation_is_left_alone(spoil: str) -> None:
    import onnx_ir as ir

    graph = trace_of(tiny_model("llama")).ir_model
    run_passes(graph, default_passes("float32", pack=True))
    rotations = [node for node in graph.graph if node.op_type == "RotaryEmbedding"]
    if spoil == "second side":  # keys that are not rotated
        ir.convenience.replace_all_uses_with(rotations[1].outputs[0], rotations[1].inputs[0])
    else:  # another operation after the rotation of the queries, by what the position is
        cos = rotations[0].inputs[1]
        node = ir.node("ReduceSum" if spoil == "scale" else "ReduceMax", [cos], attributes={"keepdims": 0})
        change = ir.node("Mul" if spoil == "scale" else "Add", [rotations[0].outputs[0], node.outputs[0]])
        change.outputs[0].type, change.outputs[0].shape = rotations[0].outputs[0].type, rotations[0].outputs[0].shape
        reader = next(use.node for use in rotations[0].outputs[0].uses() if use.node is not change)
        graph.graph.insert_after(rotations[0], [node, change])
        reader.replace_input_with(0, change.outputs[0])
    assert fuse_rotary(graph, ROWS) == 1, "the other layer is as it was"


def test_rows_of_the_tables_cover_every_cache_row() -> None:
    assert rotary_rows(1024, 1024) == 1024 + 65
    assert rotary_rows(512, None) == rotary_rows(4096, 10**6) == 4096 + 65, "ordinary lengths share one engine"
    assert rotary_rows(10_000, 2**17) == 10_065
