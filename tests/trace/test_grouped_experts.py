"""Which experts become one operator, and that the others stay as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.ops.spec import EACH, EXPERTS
from specexport.trace.check import reference_logits, trace_checkpoint
from specexport.trace.experts import Gating, gating_of
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, VOCAB, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine, build, make_checkpoint

pytestmark = pytest.mark.exports

SWIGLU = Gating(interleaved=0, alpha=1.0, beta=0.0, limit=0.0)
LAYERS = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1}
"""Layers with experts; the first of DeepSeek's has none."""
PREFILL, VERIFY = (9, 17, 4), (5, 1, 3)


def expert_modules(model: Any) -> list[Any]:
    """Modules with stacked weights."""
    return [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), torch.Tensor)]


def count_experts(ir_model: Any) -> int:
    """Operators in a trace."""
    return sum(node.op_type == EXPERTS.name and node.domain == EXPERTS.domain for node in ir_model.graph)


@pytest.mark.parametrize("name", LAYERS)
def test_gates_are_found_by_what_they_compute(name: str) -> None:
    modules = expert_modules(tiny_model(name))
    clamped = Gating(interleaved=1, alpha=1.702, beta=1.0, limit=7.0)
    assert [gating_of(module) for module in modules] == [clamped if name == "gpt_oss" else SWIGLU] * LAYERS[name]


def test_a_changed_gate_is_not_taken_for_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(*ARCHITECTURES["qwen3_moe"])
    module = expert_modules(model)[0]
    own = type(module)._apply_gate
    assert gating_of(module) == SWIGLU
    for other in (
        lambda self, x: own(self, x) * 1.001,
        lambda self, x: own(self, x.clamp(max=30.0)),  # a limit that no number of the module tells
        lambda self, x: own(self, x)[:, 1:],
        lambda self, x: torch.nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ):
        monkeypatch.setattr(type(module), "_apply_gate", other)
        assert gating_of(module) is None
    assert count_experts(trace_checkpoint(make_checkpoint(model), group_experts=True).ir_model) == 0


@pytest.mark.one_of_kind
@pytest.mark.parametrize("name", LAYERS)
def test_routing_is_the_models_own_at_all_widths(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    before = model.config._experts_implementation
    random = np.random.default_rng(5)
    sequences = [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PREFILL, VERIFY, strict=True)]
    expected = reference_logits(make_checkpoint(model), sequences)
    assert count_experts(trace_of(model, group_experts=True).ir_model) == LAYERS[name]
    ir_model, layers, _ = build(model, tmp_path, group_experts=True)
    assert sum(node.op_type == "BlockExperts" for node in ir_model.graph) == LAYERS[name]
    assert model.config._experts_implementation == before
    engine = Engine(tmp_path, layers, num_rows=len(sequences), capacity=40)
    for row, past in enumerate(PREFILL):
        logits = engine.step([sequences[row][:past]], [0], first_row=row)
        np.testing.assert_allclose(logits, expected[row][:past], atol=1e-4)
    verify = engine.step([ids[past:] for ids, past in zip(sequences, PREFILL, strict=True)], PREFILL)
    wanted = np.concatenate([logits[past:] for logits, past in zip(expected, PREFILL, strict=True)])
    np.testing.assert_allclose(verify, wanted, atol=1e-4)


@pytest.mark.parametrize(("activation", "squared"), [("relu2", True), ("relu", False), ("gelu", False)])
def test_experts_without_gates_are_squared_or_stay_batched(activation: str, squared: bool) -> None:
    classes, config = HYBRIDS["nemotron_h"]
    model = make_model(classes, config | {"mlp_hidden_act": activation})
    wanted = Gating(interleaved=EACH, alpha=1e6, beta=0.0, limit=0.0) if squared else None
    assert [gating_of(module) for module in expert_modules(model)] == [wanted]


@pytest.mark.one_of_kind
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_token_of_a_quantized_model_depends_on_the_step(name: str, kind: str, tmp_path: Path) -> None:
    from specexport.backends.ort import write_onnx
    from specexport.lowering.ort_cpu import lower_ort_cpu
    from specexport.passes.pipeline import default_passes, run_passes

    traced = trace_of(tiny_model(name), group_experts=True)
    graph = traced.ir_model
    report = dict(run_passes(graph, default_passes("float32", quantize=kind)))
    assert report["experts-quantize"] == LAYERS[name]
    routers = [n for n in graph.graph if n.op_type == "BlockLinear" and n.attributes["N"].as_int() == 4]
    assert [node.attributes["format"].as_string() for node in routers] == ["int8"] * LAYERS[name]
    lower_ort_cpu(graph)
    assert not any(node.op_type in ("MatMul", "Gemm", EXPERTS.name) for node in graph.graph)
    write_onnx(graph, tmp_path)
    random = np.random.default_rng(6)
    sequences = [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PREFILL, VERIFY, strict=True)]
    together = Engine(tmp_path, traced.layers, num_rows=len(sequences), capacity=40)
    for row, past in enumerate(PREFILL):
        together.step([sequences[row][:past]], [0], first_row=row)
    found = together.step([ids[past:] for ids, past in zip(sequences, PREFILL, strict=True)], PREFILL)
    alone = []
    for ids, past in zip(sequences, PREFILL, strict=True):
        engine = Engine(tmp_path, traced.layers, num_rows=1, capacity=40)
        engine.step([ids[:past]], [0])
        alone += [engine.step([[token]], [at]) for at, token in enumerate(ids[past:], start=past)]
    np.testing.assert_array_equal(found, np.concatenate(alone))
