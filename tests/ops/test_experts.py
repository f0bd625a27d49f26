"""Experts as one operator: torch form and lowerings against the reference, and no token that depends on others."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch

import specexport.ops.torch_ops  # noqa: F401 - registers the torch op
from specexport.ops.reference import experts
from specexport.ops.spec import EACH, EXPERTS
from specexport.passes.block_experts import replace_float_experts
from specexport.passes.block_format import pack, packed_shape, unpack
from specexport.passes.block_weight import BlockWeight
from specexport.passes.clean_up import WeightRemovePass
from specexport.passes.quantize_kept import KeptExpertsPass
from specexport.passes.quantize_ort_cpu import ExpertsQuantizePass
from tests.support.cases import chance
from tests.support.cases.linear_cases import random_weight
from tests.support.references.sessions import session_of


class Case(NamedTuple):
    """Sizes and kind of a layer: H, E, K, I, biases, and attributes that are not the usual ones."""

    depth: int
    num_experts: int
    per_token: int
    width: int
    biased: bool = False
    gating: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "plain": Case(64, 6, 2, 96),
    "eight_of_sixteen": Case(128, 16, 8, 64),
    "without_a_gate": Case(96, 5, 3, 48, False, {"interleaved": EACH, "alpha": 1e6}),
    "clamped_and_biased": Case(96, 5, 3, 48, True, {"interleaved": 1, "alpha": 1.702, "beta": 1.0, "limit": 1.5}),
    "limit_alone": Case(64, 4, 4, 32, True, {"limit": 0.25}),
    "odd_sizes": Case(72, 3, 2, 20),
}
USUAL = {item.name: item.default for item in EXPERTS.attributes}
LARGEST_ERROR = {8: 0.03, 4: 0.25}


def weights_of(case: Case) -> dict[str, np.ndarray]:
    """Random weights that keep activations as large as they are."""
    random = np.random.default_rng(chance.seed(31))
    depth, width, count = case.depth, case.width, case.num_experts
    outputs = width if case.gating.get("interleaved") == EACH else 2 * width
    shapes = {"gate_up": (outputs, depth), "down": (depth, width)}
    made = {name: random.normal(size=(count, n, k)) * k**-0.5 for name, (n, k) in shapes.items()}
    if case.biased:
        made |= {f"{name}_bias": random.normal(size=(count, n)) for name, (n, _) in shapes.items()}
    return {name: array.astype(np.float32) for name, array in made.items()}


def step_of(case: Case, num_tokens: int, *, alike: bool = False) -> dict[str, np.ndarray]:
    """Tokens with their experts and any weights; ``alike`` tokens have chosen the same experts."""
    random = np.random.default_rng(chance.seed(num_tokens))
    scores = random.random((1 if alike else num_tokens, case.num_experts)).repeat(num_tokens if alike else 1, 0)
    return {
        "x": random.normal(size=(num_tokens, case.depth)).astype(np.float32),
        "expert_ids": np.argsort(scores, axis=1)[:, : case.per_token].astype(np.int64),
        "expert_weights": random.normal(size=(num_tokens, case.per_token)).astype(np.float32),
    }


def runner(model: ir.Model) -> Any:
    session = session_of(model, num_threads=2)
    return lambda step: session.run(None, step)[0]


def layer(case: Case, weights: dict[str, np.ndarray], how: int | Mapping[str, BlockWeight] | None) -> ir.Model:
    """One layer with float weights, with weights of 8 or 4 bits, or with integers of a checkpoint."""

    def value(name: str, dtype: ir.DataType, shape: list[Any]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    given = {
        "x": value("x", ir.DataType.FLOAT, ["T", case.depth]),
        "expert_ids": value("expert_ids", ir.DataType.INT64, ["T", case.per_token]),
        "expert_weights": value("expert_weights", ir.DataType.FLOAT, ["T", case.per_token]),
    }
    inputs = list(given.values())
    for name, array in weights.items():
        given[name] = value(name, ir.DataType.FLOAT, list(array.shape))
        given[name].const_value = ir.tensor(array, name=name)
    output = value("output", ir.DataType.FLOAT, ["T", case.depth])
    node = ir.node(
        EXPERTS.name, [given.get(item.name) for item in EXPERTS.inputs], domain=EXPERTS.domain,
        attributes=USUAL | dict(case.gating), outputs=[output],
    )  # fmt: skip
    stored = [given[name] for name in weights]
    graph = ir.Graph(inputs, [output], nodes=[node], initializers=stored, opset_imports={"": 23}, name="layer")
    model = ir.Model(graph, ir_version=10)
    if how is not None:
        taken = ExpertsQuantizePass(how) if isinstance(how, int) else KeptExpertsPass(how)
        assert taken.rewrite(model) == 1
        WeightRemovePass().rewrite(model)
    assert replace_float_experts(model) == (how is None)
    return model


def reference(case: Case, weights: dict[str, np.ndarray], step: dict[str, np.ndarray]) -> np.ndarray:
    given = [(step | weights).get(item.name) for item in EXPERTS.inputs]
    return experts(*given, **(USUAL | dict(case.gating)))  # type: ignore[arg-type]


def unpacked(weight: BlockWeight) -> np.ndarray:
    return unpack(weight.kind, pack(weight.kind, weight), *weight.shape)


def one_by_one(run: Any, step: dict[str, np.ndarray]) -> np.ndarray:
    count = len(step["x"])
    return np.concatenate([run({name: array[i : i + 1] for name, array in step.items()}) for i in range(count)])


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
def test_torch_form_and_float_kernel_are_the_reference(name: str) -> None:
    case = CASES[name]
    weights = weights_of(case)
    run = runner(layer(case, weights, None))
    for num_tokens in (1, 2, 7, 40):
        step = step_of(case, num_tokens)
        wanted = reference(case, weights, step)
        np.testing.assert_allclose(run(step), wanted, atol=2e-5)
        given = [(step | weights).get(item.name) for item in EXPERTS.inputs]
        tensors = [None if array is None else torch.from_numpy(array) for array in given]
        found = torch.ops.specexport.experts(*tensors, *(USUAL | dict(case.gating)).values())
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_token_of_quantized_experts_has_the_same_bits_in_any_company(name: str, bits: int) -> None:
    case = CASES[name]
    weights = weights_of(case)
    run = runner(layer(case, weights, bits))
    for num_tokens, alike in ((3, False), (64, True)):
        step = step_of(case, num_tokens, alike=alike)
        found = run(step)
        np.testing.assert_array_equal(found, one_by_one(run, step))
    wanted = reference(case, weights, step)
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < LARGEST_ERROR[bits]


@pytest.mark.parametrize("bits", [None, 8])
def test_weights_are_as_narrow_as_their_values(bits: int | None) -> None:
    case = CASES["clamped_and_biased"]
    weights = weights_of(case)
    weights["gate_up"] = (weights["gate_up"].view(np.uint32) & 0xFFFF0000).view(np.float32)
    weights["down"][0, 0, 0] = 1e-30  # no float16
    model = layer(case, weights, bits)
    (node,) = [node for node in model.graph if node.op_type == "BlockExperts"]
    formats = [node.attributes[f"{name}_format"].as_string() for name in ("gate_up", "down")]
    assert formats == (["bf16", "f32"] if bits is None else ["int8", "int8"])
    assert sorted(model.graph.initializers) == sorted(value.name for value in node.inputs[3:])
    assert [tuple(value.shape) for value in node.inputs[3:6:2]] == [
        (5 * -(-n // 16), packed_shape(kind, n, k)[1]) for kind, n, k in zip(formats, (96, 96), (96, 48), strict=True)
    ]


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "group8_128_f16_zero"])
def test_integers_of_a_checkpoint_are_kept_with_float_weights_beside_them(kind: str) -> None:
    case = Case(256, 3, 2, 36, gating={"interleaved": 1})  # outputs of an expert are no whole tiles
    kept = random_weight(kind, 3 * 72, 256, np.random.default_rng(5))
    weights = weights_of(case)
    weights["gate_up"] = unpacked(kept).reshape(3, 72, 256)
    model = layer(case, weights, {"gate_up": replace(kept, kind=kind.upper())})
    (node,) = [node for node in model.graph if node.op_type == "BlockExperts"]
    assert node.attributes["gate_up_format"].as_string() == kind
    assert node.attributes["down_format"].as_string() == "f32"
    step = step_of(case, 9)
    run = runner(model)
    found, wanted = run(step), reference(case, weights, step)
    np.testing.assert_array_equal(found, one_by_one(run, step))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.02, "only activations are rounded"
