"""Models with fewer layers: which are chosen, what is left of the others, and what is refused."""

from typing import Any

import numpy as np
import pytest

from specexport.trace.check import compute_reference_logits
from specexport.trace.geometry import probe_layers
from specexport.trace.prune import choose_layers, drop_layers
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_models import ARCHITECTURES, VOCAB, make_llama, make_model
from tests.support.references.engine_harness import make_checkpoint

DEPTH = 4
DEPTHS = {"num_hidden_layers": DEPTH, "n_layer": DEPTH}
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
PER_LAYER = {"layer_types": TYPES, "no_rope_layers": [1, 0, 1, 1]}
DROPPED = (0, 2)
KEPT = (1, 3)
PIECES = [np.random.default_rng(seed).integers(3, VOCAB, 24) for seed in range(2)]


def config_of(name: str, kept: tuple[int, ...]) -> dict[str, Any]:
    _, config = ARCHITECTURES[name]
    config = {key: value for key, value in config.items() if key not in PER_LAYER}
    config |= {key: len(kept) for key in DEPTHS if key in config}
    for key, owners in (("layer_types", ("gemma2", "gemma3", "gpt_oss", "cohere2")), ("no_rope_layers", ("smollm3",))):
        if name in owners:
            config[key] = [PER_LAYER[key][i] for i in kept]
    return config


def numbered(name: str) -> tuple[str, int, str] | None:
    """A weight's name before and after the number of its layer, and that number."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part.isdigit()]
    if not places:
        return None
    first = places[0]
    return ".".join(parts[:first]), int(parts[first]), ".".join(parts[first + 1 :])


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3", "cohere2", "gpt_oss", "smollm3", "gpt2", "opt"])
def test_what_stays_is_the_model_that_has_these_layers_only(name: str) -> None:
    """Weights, order, layer types, windows and rotary embeddings: as in a model that is made with two layers."""
    classes = ARCHITECTURES[name][0]
    model = make_model(classes, config_of(name, tuple(range(DEPTH))))
    small = make_model(classes, config_of(name, KEPT), seed=1)
    weights = {}
    for key, value in model.state_dict().items():
        place = numbered(key)
        if place is None:
            weights[key] = value
        elif place[1] in KEPT:
            weights[f"{place[0]}.{KEPT.index(place[1])}.{place[2]}"] = value
    small.load_state_dict(weights)
    tokens = [ids.tolist() for ids in PIECES]
    wanted, calls = compute_reference_logits(make_checkpoint(small), tokens), probe_layers(small)

    checkpoint = make_checkpoint(model)
    before = compute_reference_logits(checkpoint, tokens)
    drop_layers(checkpoint, DROPPED)
    found = compute_reference_logits(checkpoint, tokens)
    assert max(np.abs(a - b).max() for a, b in zip(found, before, strict=True)) > 0.1
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert probe_layers(model) == calls
    assert sorted(model.state_dict()) == sorted(weights)
    assert checkpoint.num_parameters == small.num_parameters()


def layered(scales: dict[int, float]) -> Any:
    """A Llama of five layers; what some of them add to the hidden state is scaled."""
    model = make_llama(3, num_hidden_layers=5)
    for i, scale in scales.items():
        layer = model.model.layers[i]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data *= scale
    return model


def test_layers_that_do_nothing_go_first_and_change_nothing() -> None:
    checkpoint = make_checkpoint(layered({1: 0.0, 2: 0.2, 3: 0.0}))
    tokens = [ids.tolist() for ids in PIECES]
    before = compute_reference_logits(checkpoint, tokens)
    chosen = choose_layers(checkpoint, 3, PIECES)
    assert [layer for layer, _ in chosen] == [1, 3, 2]
    assert [similarity for _, similarity in chosen[:2]] == [1.0, 1.0]
    assert chosen[2][1] < 1.0
    drop_layers(checkpoint, [1, 3])
    assert all(np.array_equal(a, b) for a, b in zip(compute_reference_logits(checkpoint, tokens), before, strict=True))


def test_a_layer_is_measured_with_those_before_it_gone() -> None:
    """Three choices at once are three single ones, each on the model that the choice before left."""
    at_once = choose_layers(make_checkpoint(layered({})), 3, PIECES)
    checkpoint, left, one_by_one = make_checkpoint(layered({})), list(range(5)), []
    for _ in at_once:
        ((layer, similarity),) = choose_layers(checkpoint, 1, PIECES)
        drop_layers(checkpoint, [layer])
        one_by_one.append((left.pop(layer), similarity))
    assert [layer for layer, _ in at_once] == [layer for layer, _ in one_by_one]
    assert [value for _, value in at_once] == pytest.approx([value for _, value in one_by_one], abs=2e-6)


def test_similarity_is_the_mean_cosine_of_input_and_output() -> None:
    import torch

    model = layered({2: 0.1})
    ((layer, similarity),) = choose_layers(make_checkpoint(model), 1, PIECES)
    cosines = []
    for ids in PIECES:
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
        cosines.append(torch.cosine_similarity(states[2], states[3], dim=-1).detach().numpy())
    assert layer == 2
    assert similarity == pytest.approx(float(np.concatenate(cosines, axis=1).mean()), abs=2e-6)


def test_layers_that_are_in_no_list_are_refused() -> None:
    import torch

    model = layered({})
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(UnsupportedModelError, match="its 5 decoder layers are in 0 lists") as refused:
        choose_layers(make_checkpoint(model), 1, PIECES)
    assert "--draft-layers" in str(refused.value.hint)


def test_a_layer_that_counts_on_its_number_is_refused() -> None:
    model = layered({})
    layer = model.model.layers[3]
    forward = layer.forward
    layer.forward = lambda hidden, **named: forward(hidden * (1 + layer.self_attn.layer_idx), **named)
    with pytest.raises(UnsupportedModelError, match="depends on their number or on their place"):
        drop_layers(make_checkpoint(model), [1])


def test_a_model_with_an_input_for_each_layer_is_refused() -> None:
    """As Gemma 3n has it: one table for all layers, cut by their number."""
    import torch

    model = layered({})
    table = torch.arange(5.0)
    inner = model.model.forward

    def forward(*given: Any, **named: Any) -> Any:
        table.view(model.config.num_hidden_layers)
        return inner(*given, **named)

    model.model.forward = forward
    with pytest.raises(UnsupportedModelError, match="without some layers its forward pass fails"):
        drop_layers(make_checkpoint(model), [1])
