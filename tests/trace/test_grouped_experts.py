"""Which experts become one operator, and that the others stay as they are."""

from typing import Any

import pytest
import torch

from specexport.ops.spec import EACH
from specexport.trace import experts
from specexport.trace.experts import Gating, find_gating, make_experts_traceable
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_model
from tests.support.models.tiny_traces import tiny_model

SWIGLU = Gating(interleaved=0, alpha=1.0, beta=0.0, limit=0.0)
LAYERS = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1}
"""Layers with experts; the first of DeepSeek's has none."""


def expert_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), torch.Tensor)]


@pytest.mark.parametrize("name", LAYERS)
def test_gates_are_found_by_what_they_compute(name: str) -> None:
    modules = expert_modules(tiny_model(name))
    clamped = Gating(interleaved=1, alpha=1.702, beta=1.0, limit=7.0)
    assert [find_gating(module) for module in modules] == [clamped if name == "gpt_oss" else SWIGLU] * LAYERS[name]


def test_a_changed_gate_is_not_taken_for_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(*ARCHITECTURES["qwen3_moe"])
    module = expert_modules(model)[0]
    own = type(module)._apply_gate
    assert find_gating(module) == SWIGLU
    for other in (
        lambda self, x: own(self, x) * 1.001,
        lambda self, x: own(self, x.clamp(max=30.0)),  # a limit that no number of the module tells
        lambda self, x: own(self, x)[:, 1:],
        lambda self, x: torch.nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ):
        monkeypatch.setattr(type(module), "_apply_gate", other)
        assert find_gating(module) is None
        with make_experts_traceable(model, grouped=True):
            assert set(experts._gatings[-1].values()) == {None}, "they stay in a batch"


@pytest.mark.parametrize(("activation", "squared"), [("relu2", True), ("relu", False), ("gelu", False)])
def test_experts_without_gates_are_squared_or_stay_batched(activation: str, squared: bool) -> None:
    classes, config = HYBRIDS["nemotron_h"]
    model = make_model(classes, config | {"mlp_hidden_act": activation})
    wanted = Gating(interleaved=EACH, alpha=1e6, beta=0.0, limit=0.0) if squared else None
    assert [find_gating(module) for module in expert_modules(model)] == [wanted]
