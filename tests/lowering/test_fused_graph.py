"""The fused graph, against eager transformers: packed layers, rotation in the attention kernel, joined norms."""

from collections import Counter
from pathlib import Path
from typing import Any

import chance
import numpy as np
import pytest

from specexport.backends.ort import write_one_token_onnx, write_onnx, write_padded_onnx
from specexport.frontend import reference_logits
from specexport.lowering.fuse import fuse_rotary, rotary_rows
from specexport.lowering.fuse_norm import fuse_norms
from specexport.lowering.one_token import lower_one_token
from specexport.lowering.ort_cpu import lower_ort_cpu
from specexport.passes import default_passes, run_passes
from tests.engine_harness import Engine, Recipe, make_checkpoint
from tests.tiny_models import BASE, VOCAB, make_model
from tests.tiny_traces import tiny_model, trace_of

PREFILL = (9, 17, 4)
VERIFY = (5, 1, 3)
ROWS = 64
WIDE = {"hidden_size": 128, "partial_rotary_factor": 0.5}
PARTIAL = {"phi_partial": ("Phi", BASE | WIDE)}
EXPECTED = {
    # Linear layers joined, attention nodes that rotate, additions joined, and the form that attention takes.
    "llama_rope_yarn": (10, 2, 4, "RotaryHalfPacked"),
    "gemma2": (10, 2, 4, "RotaryHalfPacked"),
    "gemma3": (10, 2, 4, "RotaryHalf"),
    "gpt_oss": (6, 2, 4, "SinksRotaryHalfPacked"),
    "cohere2": (10, 1, 0, "RotaryInterleavedPacked"),
    "phi_partial": (6, 2, 2, "RotaryHalfPacked"),
    "gpt2": (0, 0, 5, "Packed"),
}
"""Window, softcap, sinks, experts, scaled and partial and interleaved rotation, norms on q and k, learned positions."""


class Fused:
    """A model through all fusions, its counts, and its engine in ``folder``."""

    def __init__(self, model: Any, folder: Path, rows: int = ROWS) -> None:
        traced = trace_of(model)
        self.folder, self.layers, self.graph = folder, traced.layers, traced.ir_model
        packed = dict(run_passes(self.graph, default_passes(Recipe(), pack=True)))["linear-pack"]
        padded = self.graph.clone()
        rotated = fuse_rotary(self.graph, rows)
        self.one_token = self.graph.clone()
        assert lower_one_token(self.one_token)
        lower_ort_cpu(self.graph)
        self.counts = packed, rotated, fuse_norms(self.graph)
        write_onnx(self.graph, folder)
        lower_ort_cpu(padded, padded_kv=True)
        write_padded_onnx(padded, folder)
        fuse_norms(self.one_token)
        write_one_token_onnx(self.one_token, folder)

    def engine(self, num_rows: int, capacity: int = 40, **options: Any) -> Engine:
        """A fresh engine."""
        return Engine(self.folder, self.layers, num_rows=num_rows, capacity=capacity, **options)

    def one_token_engine(self, engine: Engine) -> Engine:
        """The graph for steps of one token a row, over the caches of ``engine``."""
        other = self.engine(0, graph="model.one_token.onnx")
        other.caches = engine.caches
        return other


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Fused:
    return Fused(tiny_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", EXPECTED)
def test_fused_logits_equal_eager_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(*PARTIAL[name]) if name in PARTIAL else tiny_model(name)
    random = np.random.default_rng(chance.seed(7))
    sequences = [random.integers(3, VOCAB, past + max(VERIFY)).tolist() for past in PREFILL]
    expected = reference_logits(make_checkpoint(model), sequences)
    fused = Fused(model, tmp_path)
    assert fused.counts == EXPECTED[name][:3]
    forms = {n.op_type.partition("Fused")[2] for n in fused.graph.graph if n.op_type.startswith("UnpaddedAttention")}
    assert EXPECTED[name][3] in forms
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
        if held is None:
            one_token = fused.one_token_engine(engine)
            for at in range(max(VERIFY)):
                ends = [past + at for past in PREFILL]
                step = one_token.step([[ids[end]] for ids, end in zip(sequences, ends, strict=True)], ends)
                wanted = np.stack([logits[end] for logits, end in zip(expected, ends, strict=True)])
                assert np.abs(step - wanted).max() < 1e-4


def test_positions_are_what_the_kernel_counts(llama: Fused) -> None:
    names = [value.name for value in llama.graph.graph.inputs]
    assert "positions" not in names, "nothing reads them once the kernel rotates"
    counts = Counter(node.op_type for node in llama.graph.graph)
    assert not counts.keys() & {"RotaryEmbedding", "Transpose", "Split", "Cos", "Sin", "Add"} - {"Split"}
    assert counts["Split"] == 2, "gate and up; q, k and v go to the kernel as they are"


@pytest.mark.fuzz
def test_one_token_steps_and_ragged_steps_agree(llama: Fused) -> None:
    random = np.random.default_rng(chance.seed(3))
    texts = random.integers(3, VOCAB, (2, 12)).tolist()
    whole = llama.engine(2)
    together = whole.step(texts, [0, 0])
    alone = llama.engine(2)
    alone.step([texts[0][:5], texts[1][:2]], [0, 0])
    for at in range(7):
        step = alone.step([[texts[0][5 + at]], [texts[1][2 + at]]], [5 + at, 2 + at])
        np.testing.assert_allclose(step, together[[5 + at, 12 + 2 + at]], atol=1e-5)
    # A row that sits out beside one with several tokens.
    step = alone.step([[], texts[1][9:]], [12, 9])
    np.testing.assert_allclose(step, together[-3:], atol=1e-5)


def test_caches_stay_where_they_are_and_capacity_costs_nothing(llama: Fused) -> None:
    results = []
    for capacity in (16, 4096):
        engine = llama.engine(2, capacity)
        engine.step([[5, 6, 7], [8, 9]], [0, 0])
        results.append(engine.step([[4], [3, 2]], [3, 2]))
        for cache in engine.caches.values():
            assert np.isfinite(cache[0, 0, :, :4]).all()
            assert np.isnan(cache[0, 0, :, 4:]).all(), "an entry beyond the row's own was written, or the cache copied"
    np.testing.assert_array_equal(*results)


def test_the_one_token_graph_has_one_kernel_a_layer_for_all_rows(llama: Fused) -> None:
    names = [str(value.name) for value in llama.one_token.graph.inputs]
    assert [name for name in names if "cache" not in name] == ["input_ids", "kv_lens", "row_totals"]
    counts = Counter(node.op_type for node in llama.one_token.graph)
    assert counts["GroupQueryAttention"] == 2
    assert counts["Reshape"] == 4, "into the kernel's form and back, once a layer"
    assert not counts.keys() & {"If", "Scan", "Concat", "UnpaddedAttention", "RowPlan"}


@pytest.mark.fuzz
def test_one_token_steps_from_the_first_token_on(llama: Fused) -> None:
    texts = np.random.default_rng(chance.seed(5)).integers(3, VOCAB, (2, 6)).tolist()
    expected = llama.engine(2).step(texts, [0, 0])
    engine = llama.engine(2)
    one_token = llama.one_token_engine(engine)
    one_token.step([[texts[0][0]]], [0])
    one_token.step([[texts[0][1]]], [1])
    for at in range(4):  # a row that begins beside one that does not
        step = one_token.step([[texts[0][2 + at]], [texts[1][at]]], [2 + at, at])
        np.testing.assert_allclose(step, expected[[2 + at, 6 + at]], atol=1e-5)
    alone = llama.one_token_engine(llama.engine(2))
    step = alone.step([texts[0][:1], texts[1][:1]], [0, 0])  # all rows begin
    np.testing.assert_allclose(step, expected[[0, 6]], atol=1e-5)


def test_a_one_token_step_writes_one_entry_a_row_wherever_its_rows_are(llama: Fused) -> None:
    results = []
    for capacity in (16, 4096):
        engine = llama.engine(4, capacity)
        engine.step([[5, 6, 7], [8, 9]], [0, 0], first_row=1)
        before = {name: cache.copy() for name, cache in engine.caches.items()}
        results.append(llama.one_token_engine(engine).step([[4], [3]], [3, 2], first_row=1))
        for name, cache in engine.caches.items():
            for row, past in ((1, 3), (2, 2)):
                np.testing.assert_array_equal(cache[row, :, :, :past], before[name][row, :, :, :past])
                assert np.isfinite(cache[row, :, :, past]).all()
                assert np.isnan(cache[row, :, :, past + 1 :]).all()
            assert np.isnan(cache[[0, 3]]).all(), "a row outside the step was touched"
    np.testing.assert_array_equal(*results)


def test_a_model_on_the_portable_body_has_no_one_token_graph() -> None:
    graph = trace_of(tiny_model("deepseek_v3")).ir_model
    run_passes(graph, default_passes(Recipe(), pack=True))
    before = [node.name for node in graph.graph]
    assert not lower_one_token(graph)
    assert [node.name for node in graph.graph] == before


def test_a_position_beyond_the_tables_is_an_error_not_a_wrong_answer(llama: Fused) -> None:
    engine = llama.engine(1, 80)
    engine.step([list(range(3, 3 + ROWS))], [0])
    with pytest.raises(Exception, match="cos_cache"):
        engine.step([[5]], [ROWS])


def test_tables_that_are_large_for_their_model_are_not_made() -> None:
    graph = trace_of(tiny_model("llama")).ir_model
    run_passes(graph, default_passes(Recipe(), pack=True))
    assert fuse_rotary(graph.clone(), None) == 0
    assert fuse_rotary(graph.clone(), 2**16) == 0, "two tables of 2 MiB each, for a model of half a megabyte"
    assert fuse_rotary(graph, 2**10) == 2


@pytest.mark.parametrize("spoil", ["scale", "shift", "second side"])
def test_what_is_no_plain_rotation_is_left_alone(spoil: str) -> None:
    import onnx_ir as ir

    graph = trace_of(tiny_model("llama")).ir_model
    run_passes(graph, default_passes(Recipe(), pack=True))
    rotations = [node for node in graph.graph if node.op_type == "RotaryEmbedding"]
    if spoil == "second side":  # keys that are not rotated
        ir.convenience.replace_all_uses_with(rotations[1].outputs[0], rotations[1].inputs[0])
    else:  # another operation behind the rotation of the queries, by what the position is
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
