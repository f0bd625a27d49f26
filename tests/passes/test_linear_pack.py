"""Packing of linear layers: which are joined, with what numbers, and what is left alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.passes.contract_check import find_contract_problems
from specexport.passes.linear_pack import LinearPackPass
from specexport.passes.pipeline import default_passes, run_passes
from tests.support.models.quantized import add_weight

Traced = Callable[[str], Any]
PACKED = {"llama": 10, "llama_tied": 10, "gpt2": 0, "phi3": 0, "qwen3_moe": 6, "deepseek_v3": 4}
"""q, k, v of both layers; with gate and up; MLA shares no product of q and k; experts and routers stay."""


def prepare(model: Any) -> Any:
    passes = default_passes("float32")
    run_passes(model, passes[: [item.name for item in passes].index("precision-cast")])
    return model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    values = model.graph.initializers.values()
    return {str(v.name): v.const_value.numpy() for v in values if v.const_value is not None and len(v.shape) == 2}


@pytest.mark.parametrize("name", PACKED)
def test_how_many_layers_are_joined(name: str, traced: Traced) -> None:
    model = prepare(traced(name))
    before = Counter(node.op_type for node in model.graph)
    packing = LinearPackPass()
    packing(model)
    after = Counter(node.op_type for node in model.graph)
    groups = after["Split"] - before["Split"]
    assert packing.changes == PACKED[name]
    assert before["MatMul"] - after["MatMul"] == packing.changes - groups
    assert not find_contract_problems(model)
    again = LinearPackPass()
    again(model)
    assert again.changes == 0, "what is packed is not packed again"


def test_the_packed_weight_is_the_weights_side_by_side_and_made_late(traced: Traced) -> None:
    model = prepare(traced("llama"))
    before = weights_of(model)
    LinearPackPass()(model)
    packed = {name: value for name, value in model.graph.initializers.items() if name.endswith(".packed")}
    assert len(packed) == 4
    assert all(isinstance(value.const_value, ir.LazyTensor) for value in packed.values())
    stem = "model.model.layers.0.self_attn.{}_proj.weight.transposed"
    parts = [before[stem.format(kind)] for kind in "qkv"]
    found = packed[stem.format("q") + ".packed"].const_value
    np.testing.assert_array_equal(found.numpy(), np.concatenate(parts, axis=1))
    assert tuple(found.shape) == (parts[0].shape[0], sum(part.shape[1] for part in parts))
    assert not {stem.format(kind) for kind in "qkv"} & set(model.graph.initializers), "the parts would be stored twice"


def test_a_layer_without_a_bias_gets_zeros_beside_one_that_has(traced: Traced) -> None:
    model = prepare(traced("gpt_oss"))
    adds = [n for n in model.graph if n.op_type == "Add" and any("k_proj.bias" in str(x.name) for x in n.inputs)]
    biases = [x.const_value.numpy() for x in adds[0].inputs if x.is_initializer()]
    value = next(n for n in model.graph if n.op_type == "Add" and any("v_proj.bias" in str(x.name) for x in n.inputs))
    ir.convenience.replace_all_uses_with(value.outputs[0], value.inputs[0])
    model.graph.remove(value, safe=True)
    LinearPackPass()(model)
    found = next(v for n, v in model.graph.initializers.items() if n.endswith("q_proj.weight.transposed.packed.bias"))
    width = biases[0].size
    np.testing.assert_array_equal(found.const_value.numpy()[-2 * width : -width], biases[0])
    assert not found.const_value.numpy()[-width:].any()


def test_a_weight_that_somebody_else_reads_is_left_alone(traced: Traced) -> None:
    model = prepare(traced("llama"))
    weight = model.graph.initializers["model.model.layers.0.mlp.up_proj.weight.transposed"]
    model.graph.append(ir.node("Neg", [weight]))
    packing = LinearPackPass()
    packing(model)
    assert packing.changes == 8


def test_layers_of_different_widths_that_meet_in_a_product_are_no_gated_mlp(traced: Traced) -> None:
    model = prepare(traced("llama"))
    gate = model.graph.initializers["model.model.layers.0.mlp.gate_proj.weight.transposed"]
    narrow = add_weight(model, "narrow", np.ones((gate.shape[0], 1), np.float32))
    next(iter(gate.uses())).node.replace_input_with(1, narrow)
    packing = LinearPackPass()
    packing(model)
    assert packing.changes == 8
