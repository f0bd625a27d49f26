"""A few traced layers stand for all of their kind: what is one kind, and that the engine is the same either way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specexport.trace.check import check_packed, trace_checkpoint
from specexport.trace.geometry import probe_layers
from specexport.trace.layer_kinds import LayerKinds, LayerWatch
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_llama, make_model
from tests.support.references.engine_harness import make_checkpoint
from tools.sweep_lib.unrolled import compare_model, engine_of

KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def kinds_of(model: Any) -> LayerKinds | str:
    return check_packed(model, probe_layers(model))


@pytest.mark.exports
@pytest.mark.parametrize(
    ("name", "config", "kinds"),
    [
        ("gemma3", {"num_hidden_layers": 6, "layer_types": KINDS}, (0, 0, 2, 0, 0, 2)),
        pytest.param(
            "deepseek_v3",
            {"num_hidden_layers": 5, "first_k_dense_replace": 1},
            (0, 1, 1, 1, 1),
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "qwen3_next",
            {"num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
            (0, 0, 2, 0, 0, 2),
            marks=pytest.mark.whole,
        ),
    ],
)
def test_the_engine_is_that_of_all_layers(name: str, config: dict[str, Any], kinds: tuple[int, ...]) -> None:
    """Windows and rotations; a dense layer before those with experts; states beside caches."""
    classes, given = (ARCHITECTURES | HYBRIDS)[name]
    model = make_model(classes, given | config)
    found = kinds_of(model)
    assert isinstance(found, LayerKinds)
    assert found.kinds == kinds
    assert len(found.traced()) < len(kinds)
    assert compare_model(make_checkpoint(model)) == (None, True)


def test_the_model_has_all_its_layers_afterwards() -> None:
    model = make_llama(num_hidden_layers=4)
    before = [dict(vars(layer)) for layer in model.model.layers]
    graph = trace_checkpoint(make_checkpoint(model)).ir_model.graph
    assert [dict(vars(layer)) for layer in model.model.layers] == before
    assert [value.name for value in graph.inputs][-2:] == ["k_cache.3", "v_cache.3"]
    assert [value.name for value in graph.outputs][1:3] == ["k_cache_out.0", "v_cache_out.0"]
    named = [name for name in graph.initializers if "layers" in name]
    assert named == [f"model.{name}" for name, _ in model.named_parameters() if "layers" in name]


def test_layers_that_compute_by_their_number_are_of_no_kind() -> None:
    """GPT-2 can divide the scores by the layer's number."""
    model = make_model(ARCHITECTURES["gpt2"][0], {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True})
    found = kinds_of(model)
    assert isinstance(found, LayerKinds)
    assert found.kinds == (0, 1, 2, 3)
    traced = trace_checkpoint(make_checkpoint(model))
    assert traced.whole == "each of its 4 layers computes something of its own"


def test_a_layer_that_another_branch_changes_is_of_its_own_kind() -> None:
    """What no configuration says: one layer's code does something more."""
    model = make_llama(num_hidden_layers=5)
    mlp = model.model.layers[3].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2
    found = kinds_of(model)
    assert isinstance(found, LayerKinds)
    assert found.kinds == (0, 0, 0, 3, 0)
    assert found.traced() == [0, 3, 4]
    assert found.traced(taps=(2,)) == [0, 1, 3, 4]


def test_what_is_computed_between_layers_is_seen() -> None:
    model = make_llama(num_hidden_layers=4)
    model.model.layers[2].register_forward_pre_hook(lambda _layer, given: (given[0] * 2, *given[1:]))
    assert kinds_of(model) == "something is computed between its layers"


def test_a_model_that_looks_into_its_layers_is_traced_whole() -> None:
    """Layers that are not traced have nothing in them meanwhile."""
    model = make_llama(num_hidden_layers=4)
    own = model.model.forward

    def forward(*given: Any, **named: Any) -> Any:
        assert all(layer.mlp.up_proj.weight is not None for layer in model.model.layers)
        return own(*given, **named)

    model.model.forward = forward
    assert kinds_of(model) == "a few of its layers do not work alone"


class _Counting(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.weight = index, torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return hidden * self.weight + table[self.index]


def test_a_layer_may_read_its_own_number() -> None:
    """As it looks up what a table has for it: the same up to the number; with another one than its own it is not."""
    for numbers, kinds in (([0, 1, 2], (0, 0, 0)), ([0, 1, 0], (0, 0, 2)), ([0, 0, 2], (0, 0, 2))):
        model: Any = torch.nn.Module()
        model.layers = torch.nn.ModuleList(_Counting(number) for number in numbers)
        model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))
        watch, hidden, table = LayerWatch(model, [], 0), torch.ones(2, 4), torch.arange(3.0)
        with watch.installed():
            for layer in model.layers:
                hidden = layer(hidden, table)
        found = watch.result()
        assert isinstance(found, LayerKinds)
        assert found.kinds == kinds


def test_the_engine_of_a_changed_layer_is_another_one() -> None:
    """What the comparison of engines would not see, no sweep would."""
    model = make_llama(num_hidden_layers=4)
    before = engine_of(trace_checkpoint(make_checkpoint(model)).ir_model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    after = engine_of(trace_checkpoint(make_checkpoint(model)).ir_model)
    assert before != after
