"""Gated layers: any mask gives the model with those sublayers left out; skipped layers leave their caches alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from specexport.lowering.common import step_inputs
from specexport.lowering.layer_gate import gate_layers
from specexport.passes.contract_check import find_lowered_problems
from specexport.passes.residual_blocks import find_residual_blocks
from specexport_runtime.abi import GATE_INPUTS, SIMILARITY
from specexport_runtime.errors import CheckFailedError
from tests.support.cases.chance import examples
from tests.support.cases.memory import process_bytes
from tests.support.models.tiny_models import ARCHITECTURES, VOCAB, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine, make_checkpoint, pack
from tests.support.references.lowered import lower_ort_cpu

TOLERANCE = 1e-4
NAMES = ["gemma2", "deepseek_v3"]  # norms after the branches, window, softcap; the portable attention body, experts
MLP_NORMS = {"gemma2": "pre_feedforward_layernorm"}


class GatedEngine(Engine):
    mask: Sequence[bool] = ()
    wanted = False
    similarity: np.ndarray

    def step(self, tokens: Sequence[Sequence[int]], pasts: Sequence[int], first_row: int = 0) -> np.ndarray:  # type: ignore[override]
        """Logits [T, V], with the layers of ``mask``; keeps ``similarity`` [N, T or 0]."""
        io = self.session.io_binding()
        step = pack(tokens, pasts)
        step |= {"layer_mask": np.array(self.mask), "want_similarity": np.array([self.wanted])}
        for name in self.inputs & set(step):
            io.bind_cpu_input(name, step[name])
        for name, cache in self.caches.items():
            rows = cache[first_row : first_row + len(tokens)]
            bound = ("cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            io.bind_input(name, *bound)
            io.bind_output(name.replace("_cache.", "_cache_out."), *bound)
        for name in ("logits", SIMILARITY.name):
            io.bind_output(name, "cpu")
        self.session.run_with_iobinding(io)
        logits, self.similarity = (value.numpy() for value in io.get_outputs()[-2:])
        return logits


class Built(NamedTuple):
    name: str
    model: Any
    ir_model: Any
    folder: Path
    layers: Any

    def engine(self, mask: Sequence[bool], *, num_rows: int = 2, capacity: int = 32) -> GatedEngine:
        engine = GatedEngine(self.folder / "gated", self.layers, num_rows, capacity)
        engine.mask = mask
        return engine


@pytest.fixture(scope="module", params=NAMES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def make(name: str, folder: Path) -> Built:
    from specexport.backends.ort import write_onnx
    from specexport.passes.pipeline import default_passes, run_passes

    model = tiny_model(name)
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes("float32", own_operators=True))
    plain = traced.ir_model.clone()
    lower_ort_cpu(plain)
    write_onnx(plain, folder / "plain")
    blocks = find_residual_blocks(traced.ir_model)
    lower_ort_cpu(traced.ir_model)
    assert gate_layers(traced.ir_model, blocks) == 2 * len(traced.layers)
    write_onnx(traced.ir_model, folder / "gated")
    return Built(name, model, traced.ir_model, folder, traced.layers)


@contextmanager
def left_out(model: Any, mask: Sequence[bool]) -> Iterator[None]:
    import torch

    def silence(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    parts = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]
    hooks = [part.register_forward_hook(silence) for part, on in zip(parts, mask, strict=True) if not on]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def eager(model: Any, mask: Sequence[bool], sequences: list[list[int]]) -> list[np.ndarray]:
    from specexport.trace.check import compute_reference_logits

    with left_out(model, mask):
        return list(compute_reference_logits(make_checkpoint(model), sequences))


SEQUENCES = [[(7 * i + 11) % (VOCAB - 3) + 3 for i in range(14)], [(5 * i + 4) % (VOCAB - 3) + 3 for i in range(12)]]


def run(engine: Engine) -> list[np.ndarray]:
    """Logits [len, V] of both sequences: a ragged prefill, a verify step, one token each, and one row alone."""
    steps = (((9, 4), (0, 0)), ((3, 5), (9, 4)), ((1, 1), (12, 9)), ((1, 0), (13, 10)), ((0, 2), (14, 10)))
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for counts, pasts in steps:
        tokens = [ids[past : past + n] for ids, past, n in zip(SEQUENCES, pasts, counts, strict=True)]
        logits = engine.step(tokens, pasts)
        for part, one in zip(parts, np.split(logits, [counts[0]]), strict=True):
            part.append(one)
    return [np.concatenate(part) for part in parts]


def test_all_gates_on_is_the_ungated_graph(built: Built) -> None:
    plain = Engine(built.folder / "plain", built.layers, 2, 32)
    for ours, theirs in zip(run(built.engine([True] * 4)), run(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


MASKS = [(True,) * 4, (False, True, True, True), (True, False, True, False), (True, True, False, False), (False,) * 4]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "".join(map(str, map(int, mask))))
def test_a_mask_leaves_out_what_transformers_leaves_out(built: Built, mask: tuple[bool, ...]) -> None:
    expected = eager(built.model, mask, SEQUENCES)
    assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"
    for ours, theirs in zip(run(built.engine(mask)), expected, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE


@examples(12, allow=tuple(HealthCheck))
@given(masks=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=4))
def test_a_draft_on_the_cache_of_the_target_leaves_no_trace(gated_engine: GatedEngine, masks: list[list[bool]]) -> None:
    """Any drafts, one after another, then the whole model over the same entries: as if they had not been."""
    engine = gated_engine
    engine.mask = [True] * 4
    wanted = run(engine)
    engine.mask = [True] * 4
    engine.step([ids[:6] for ids in SEQUENCES], [0, 0])
    for at, mask in enumerate(masks):
        engine.mask = mask
        engine.step([[40 + at], [50 + at]], [6 + at, 6 + at])
    engine.mask = [True] * 4
    logits = engine.step([ids[6:12] for ids in SEQUENCES], [6, 6])
    np.testing.assert_array_equal(logits, np.concatenate([part[6:12] for part in wanted]))


@pytest.fixture(scope="module")
def gated_engine(built: Built) -> GatedEngine:
    return built.engine([True] * 4)


def test_caches_of_skipped_layers_stay_as_they_are(built: Built) -> None:
    engine = built.engine([True, True, False, True])
    engine.step([[5, 6, 7], [8]], [0, 0])
    engine.mask = [False, False, False, True]
    before = {name: cache.tobytes() for name, cache in engine.caches.items()}
    engine.step([[4, 9], [3]], [3, 1])
    assert {name: cache.tobytes() for name, cache in engine.caches.items()} == before
    assert np.isfinite(engine.caches["k_cache.0"][0, 0, :, :3]).all()
    assert np.isnan(engine.caches["v_cache.1"]).all()


@pytest.mark.parametrize("mask", [(True,) * 4, (True, True, False, True), (False,) * 4])
def test_no_cache_is_copied(built: Built, mask: tuple[bool, ...]) -> None:
    """Half a gigabyte of cache that nobody has touched: a copy of any of it, to anywhere, would become resident."""
    capacity = (128 << 20) // (built.layers[0].kv_heads * built.layers[0].k_dim * 4)
    engine = built.engine(mask, num_rows=1, capacity=16)
    engine.step([[5, 6]], [0])
    engine.caches = {
        name: np.zeros((*cache.shape[:3], capacity, cache.shape[4]), np.float32)
        for name, cache in engine.caches.items()
    }
    engine.step([[5, 6]], [0])
    before = process_bytes()
    engine.step([[7]], [2])
    engine.step([[8, 9, 3]], [3])
    assert process_bytes() - before < 32 << 20


def test_the_similarity_is_that_of_the_stream_around_each_attention(built: Built) -> None:
    import torch

    seen: dict[tuple[int, str], Any] = {}
    hooks = []
    for i, layer in enumerate(built.model.model.layers):
        norm = getattr(layer, MLP_NORMS.get(built.name, "post_attention_layernorm"))
        for key, module in (("before", layer), ("after", norm)):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, args, kwargs, at=(i, key): seen.update(
                        {at: (args or [kwargs["hidden_states"]])[0]}
                    ),
                    with_kwargs=True,
                )
            )
    mask = [True, True, True, False]
    engine = built.engine(mask, num_rows=1)
    engine.wanted = True
    ids = SEQUENCES[0][:9]
    engine.step([ids], [0])
    eager(built.model, mask, [ids])
    for hook in hooks:
        hook.remove()
    expected = [torch.cosine_similarity(seen[i, "before"][0], seen[i, "after"][0], dim=-1).numpy() for i in range(2)]
    np.testing.assert_allclose(engine.similarity, expected, atol=1e-5)
    assert np.ptp(expected) > 0.05


def test_no_similarity_unless_it_is_wanted_and_one_for_what_is_off(built: Built) -> None:
    engine = built.engine([False, True, False, True])
    engine.step([[5, 6], [7]], [0, 0])
    assert engine.similarity.shape == (2, 0)
    engine.wanted = True
    engine.step([[5, 6], []], [0, 0])
    np.testing.assert_allclose(engine.similarity, np.ones((2, 2)), atol=1e-6)


@pytest.fixture(scope="module")
def llama() -> Any:
    """The trace of a model in which token 5 has a zero vector."""
    import torch

    from specexport.passes.pipeline import default_passes, run_passes
    from specexport.trace.check import trace_checkpoint

    model = make_model(*ARCHITECTURES["llama"])
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = 0
    traced = trace_checkpoint(make_checkpoint(model))
    run_passes(traced.ir_model, default_passes("float32"))
    return traced


def test_a_token_without_any_direction_has_no_similarity_and_no_nan(llama: Any, tmp_path: Path) -> None:
    from specexport.backends.ort import write_onnx

    ir_model = llama.ir_model.clone()
    blocks = find_residual_blocks(ir_model)
    lower_ort_cpu(ir_model)
    gate_layers(ir_model, blocks)
    write_onnx(ir_model, tmp_path)
    engine = GatedEngine(tmp_path, llama.layers, 1, 16)
    engine.mask, engine.wanted = [True] * 4, True
    assert np.isfinite(engine.step([[5, 6]], [0])).all()
    assert np.isfinite(engine.similarity).all()
    assert abs(engine.similarity[0, 0]) < 1e-6


def test_the_gates_are_in_the_contract_s_form(built: Built) -> None:
    assert step_inputs(built.ir_model)[-2:] == tuple(spec.name for spec in GATE_INPUTS)
    values = {value.name: value for value in (*built.ir_model.graph.inputs, *built.ir_model.graph.outputs)}
    assert list(values["layer_mask"].shape) == [4]
    assert list(values["want_similarity"].shape) == [1]
    assert values[SIMILARITY.name].shape[0] == 2
    assert values[SIMILARITY.name].shape[1] != "num_tokens", "it may have none"
    assert find_lowered_problems(built.ir_model) == []


def test_a_lowering_that_joins_a_layer_with_something_else_is_not_gated(llama: Any) -> None:
    import onnx_ir as ir

    ir_model = llama.ir_model.clone()
    blocks = find_residual_blocks(ir_model)
    lower_ort_cpu(ir_model)
    inner = next(node for node in ir_model.graph if node.op_type == "Sigmoid").outputs[0]
    ir_model.graph.append(ir.node("Relu", [inner]))
    with pytest.raises(CheckFailedError, match="layer 0's MLP is read beyond the residual stream"):
        gate_layers(ir_model, blocks)
