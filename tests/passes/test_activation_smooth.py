"""SmoothQuant before quantization: the same function, and outlying channels no longer cost the others their bits."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specexport.frontend import Checkpoint, activation_ranges
from specexport.passes import default_passes, run_passes
from specexport.passes.activation_smooth import ActivationSmoothPass
from tests.engine_harness import Engine, Recipe
from tests.tiny_models import ARCHITECTURES, make_model
from tests.tiny_traces import tiny_model, trace_of

TOKENS = [3, 4, 5, 9, 11, 7, 60, 61, 62, 250]
SMOOTHED = {"llama": 13, "llama_tied": 11, "qwen2": 13, "gemma3": 13, "gpt2": 5, "olmo2": 3}
"""Of two layers: q, k, v, gate, up and down, and the LM head. The second has biases between up and down, GPT-2 has no
gate, OLMo 2 has its norms behind the layers."""


def ranges_of(model: Any) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint(**dict.fromkeys(Checkpoint.__dataclass_fields__) | {"model": model})
    return activation_ranges(checkpoint, [np.array(TOKENS, np.int64), np.array(TOKENS[::-1], np.int64)])


def computed(traced: Any) -> np.ndarray:
    """Logits of TOKENS."""
    from specexport.backends.ort import write_onnx
    from specexport.lowering.ort_cpu import lower_ort_cpu

    lower_ort_cpu(traced.ir_model)
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(traced.ir_model, Path(folder))
        return Engine(Path(folder), traced.layers, num_rows=1, capacity=24).step([TOKENS], [0])


def logits_of(model: Any, quantize: str | None, ranges: Any) -> np.ndarray:
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes(Recipe(), pack=True, quantize=quantize, ranges=ranges))
    return computed(traced)


def far_channels() -> Any:
    """A model with one channel of each norm 60 times as large, and the layers behind it as much smaller there."""
    model = make_model(*ARCHITECTURES["llama"])
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
            ):
                norm.weight[5] *= 60
                for reader in readers:
                    reader.weight[:, 5] /= 60
            layer.mlp.up_proj.weight[7] *= 60
            layer.mlp.down_proj.weight[:, 7] /= 60
    return model


def distance(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("name", SMOOTHED)
def test_the_model_computes_the_same(name: str) -> None:
    ranges = ranges_of(tiny_model(name))
    models = [trace_of(tiny_model(name)) for _ in range(2)]
    for traced in models:
        run_passes(traced.ir_model, default_passes(Recipe()))
    smooth = ActivationSmoothPass({name: found.largest for name, found in ranges.items()})
    smooth(models[1].ir_model)
    assert smooth.changes == SMOOTHED[name]
    plain, found = (computed(traced) for traced in models)
    assert 0 < distance(found, plain) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_outlying_channels_cost_the_others_nothing(kind: str) -> None:
    ranges = ranges_of(far_channels())
    ways = ((None, None), (kind, None), (kind, ranges))
    exact, rough, smooth = (logits_of(far_channels(), *way) for way in ways)
    assert distance(smooth, exact) < 0.6 * distance(rough, exact)


def test_ranges_are_those_of_every_token_but_the_first() -> None:
    model = tiny_model("llama")
    found = ranges_of(model)
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, 1:].abs()))
    with torch.no_grad():
        for ids in (TOKENS, TOKENS[::-1]):
            model(torch.tensor([ids]))
    hook.remove()
    name = "model.model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(found[name].largest, torch.cat(seen).amax(0).numpy())
    assert set(found) == {
        f"model.{name}" for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    }


def test_a_weight_of_two_names_is_under_both() -> None:
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} <= set(ranges_of(tiny_model("llama_tied")))


def test_what_somebody_else_reads_stays() -> None:
    text = """<ir_version: 10, opset_import: ["": 23]> g (float[2, 4] x) => (float[2, 4] y, float[2, 4] n) {
        n = RMSNormalization (x, scale) y = MatMul (n, weight)
    }"""
    weights = {"scale": np.ones(4, np.float32), "weight": np.eye(4, dtype=np.float32)}
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])
    ranges = {"weight": np.array([1, 2, 3, 400], np.float32)}
    assert not ActivationSmoothPass(ranges)(model).modified, "the norm's result is an output too"
