"""Layers of experts in every kind of weight, what ``BlockExperts`` is to compute in float64, and sessions of it."""

import sys
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from specexport.ops.spec import EACH
from specexport.passes.block_format import FLOATS, TILE
from tests.support.cases import linear_cases
from tests.support.references.block_arithmetic import reference

Arrays = dict[str, np.ndarray]


class Layer(NamedTuple):
    gate_up: str
    down: str
    num_experts: int
    per_token: int
    depth: int
    width: int
    interleaved: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0
    biased: bool = False

    @property
    def outputs(self) -> int:
        return self.width if self.interleaved == EACH else 2 * self.width


def weights_of(layer: Layer, generator: np.random.Generator) -> Arrays:
    shapes = {"gate_up": (layer.gate_up, layer.outputs, layer.depth), "down": (layer.down, layer.depth, layer.width)}
    made = {
        name: np.concatenate([linear_cases.packed(kind, n, k, generator) for _ in range(layer.num_experts)])
        for name, (kind, n, k) in shapes.items()
    }
    if layer.biased:
        sizes = {"gate_up_bias": layer.outputs, "down_bias": layer.depth}
        for name, size in sizes.items():
            made[name] = generator.standard_normal((layer.num_experts, size)).astype(np.float32)
    return made


def step_of(layer: Layer, num_tokens: int, generator: np.random.Generator) -> Arrays:
    """Tokens, the second half of which have much the same experts; weights of any sign."""
    ids = generator.integers(0, layer.num_experts, (num_tokens, layer.per_token))  # one may be there twice
    ids[num_tokens // 2 :, 0] = ids[-1:, 0]
    return {
        "x": generator.standard_normal((num_tokens, layer.depth)).astype(np.float32),
        "expert_ids": ids,
        "expert_weights": generator.standard_normal((num_tokens, layer.per_token)).astype(np.float32),
    }


def session(library: str, layer: Layer, weights: Arrays, threads: int = 1) -> ort.InferenceSession:
    return linear_cases.opened(library, model_of(layer, weights).SerializeToString(), threads)


def model_of(layer: Layer, weights: Arrays) -> onnx.ModelProto:
    names = ("x", "expert_ids", "expert_weights", "gate_up", "gate_up_bias", "down", "down_bias")
    given = {"x": (TensorProto.FLOAT, 2), "expert_ids": (TensorProto.INT64, 2)}
    given["expert_weights"] = (TensorProto.FLOAT, 2)
    attributes = {"E": layer.num_experts, "H": layer.depth, "I": layer.width}
    attributes |= {"gate_up_format": layer.gate_up, "down_format": layer.down}  # type: ignore[dict-item]
    attributes |= {name: getattr(layer, name) for name in ("interleaved", "alpha", "beta", "limit")}
    inputs = [name if name in given or name in weights else "" for name in names]
    node = helper.make_node("BlockExperts", inputs, ["y"], domain="specexport", **attributes)
    return linear_cases.model_of([node], given, weights, ["y"])


def wanted(layer: Layer, weights: Arrays, step: Arrays) -> np.ndarray:
    """As ``reference_experts`` says, with activations rounded as ``BlockLinear`` rounds them."""

    def product(name: str, kind: str, expert: int, n: int, x: np.ndarray) -> np.ndarray:
        tiles = -(-n // TILE)
        part = weights[name][expert * tiles : (expert + 1) * tiles]
        bias = weights[f"{name}_bias"][expert] if layer.biased else 0
        return reference(kind, part, n, x.shape[1], x) + bias

    output = np.zeros(step["x"].shape, np.float64)
    for token, chosen in enumerate(step["expert_ids"]):
        for place, expert in enumerate(chosen):
            both = product("gate_up", layer.gate_up, expert, layer.outputs, step["x"][token : token + 1])[0]
            gate, up = both, both
            if layer.interleaved != EACH:
                gate, up = (both[::2], both[1::2]) if layer.interleaved else np.split(both, 2)
            if layer.limit > 0:
                gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
            hidden = gate * np.exp(-np.logaddexp(0, -layer.alpha * gate)) * (up + layer.beta)
            given = product("down", layer.down, expert, layer.depth, hidden[None].astype(np.float32))[0]
            output[token] += step["expert_weights"][token, place] * given
    return output


def assert_right(library: str, layer: Layer, generator: np.random.Generator) -> None:
    """Against float64, and bits against those of each token alone, for one and two threads."""
    weights = weights_of(layer, generator)
    step = step_of(layer, 21, generator)
    runs = [session(library, layer, weights, threads).run for threads in (1, 2)]
    found = runs[0](None, step)[0]
    right = wanted(layer, weights, step)
    errors = np.abs(found - right) / np.abs(right).max()
    # The last bit of a product may round an activation of the next one to its other side.
    most = 1e-5 if layer.down in FLOATS else 5e-3
    assert np.median(errors) <= 2e-6, f"{layer}: {np.median(errors)}"
    assert errors.max() <= most, f"{layer}: {errors.max()}"
    for run in runs:
        for cut in (1, 2, 5, 21):
            parts = [
                run(None, {name: array[at : at + cut] for name, array in step.items()})[0] for at in range(0, 21, cut)
            ]
            assert np.concatenate(parts).tobytes() == found.tobytes(), f"{layer}: {cut} tokens at a time"
        order = generator.permutation(21)
        moved = run(None, {name: array[order] for name, array in step.items()})[0]
        assert moved.tobytes() == found[order].tobytes(), f"{layer}: in another order"


def drawn(generator: np.random.Generator) -> Layer:
    pick: Any = generator.choice
    number = generator.integers
    return Layer(
        str(pick(linear_cases.ALL)), str(pick(linear_cases.ALL)), int(number(1, 9)), int(number(1, 5)),
        int(number(1, 200)), int(number(1, 200)), int(number(0, 3)), float(pick([1.0, 1.702])), float(pick([0.0, 1.0])),
        float(pick([0.0, 0.5])), bool(pick([True, False])),
    )  # fmt: skip


def main() -> None:
    linear_cases.require_kernels(sys.argv[1])
    generator = np.random.default_rng(int(sys.argv[2]))
    for _ in range(int(sys.argv[3])):
        assert_right(sys.argv[1], drawn(generator), generator)


if __name__ == "__main__":
    main()
