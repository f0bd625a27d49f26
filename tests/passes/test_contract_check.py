"""Every way to break the contract is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.lowering.ort_cpu import operator_passes
from specexport.passes.base import CountingPass, Rewrite, attention_nodes
from specexport.passes.contract_check import find_contract_problems
from specexport.passes.pipeline import default_passes, run_lowering, run_passes
from specexport_runtime.errors import CheckFailedError


def swap_caches(model: ir.Model) -> None:
    first, second = attention_nodes(model)
    a, b = first.inputs[3], second.inputs[3]
    first.replace_input_with(3, b)
    second.replace_input_with(3, a)


def forget_an_input(model: ir.Model) -> None:
    model.graph.inputs.remove(next(v for v in model.graph.inputs if v.name == "kv_lens"))


def add_an_input(model: ir.Model) -> None:
    model.graph.inputs.append(ir.Value(name="mask", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])))


def change_a_dtype(model: ir.Model) -> None:
    next(v for v in model.graph.inputs if v.name == "positions").type = ir.TensorType(ir.DataType.INT32)


def change_a_shape(model: ir.Model) -> None:
    next(v for v in model.graph.inputs if v.name == "logit_rows").shape = ir.Shape(["num_tokens"])


def fix_a_dimension(model: ir.Model) -> None:
    next(v for v in model.graph.inputs if v.name == "input_ids").shape = ir.Shape([7])


def drop_an_attention(model: ir.Model) -> None:
    list(attention_nodes(model))[1].op_type = "Something"


def widen_a_weight(model: ir.Model) -> None:
    tensor = ir.tensor(np.zeros((2, 2), np.float64), name="wide")
    model.graph.initializers["wide"] = ir.Value(name="wide", const_value=tensor, type=ir.TensorType(tensor.dtype))


def half_the_logits(model: ir.Model) -> None:
    next(v for v in model.graph.outputs if v.name == "logits").type = ir.TensorType(ir.DataType.FLOAT16)


BREAKERS: dict[str, tuple[Callable[[ir.Model], None], str]] = {
    "swapped caches": (swap_caches, "attention 0 uses k_cache.1 in the place of k_cache.0"),
    "missing input": (forget_an_input, "input kv_lens is missing"),
    "extra input": (add_an_input, "input mask is unexpected"),
    "dtype": (change_a_dtype, "input positions is INT32, not int64"),
    "dimension": (change_a_shape, "logit_rows has num_tokens where the contract has num_logit_rows"),
    "fixed dimension": (fix_a_dimension, "input_ids has 7 where the contract has num_tokens"),
    "attention count": (drop_an_attention, "k_cache.1 is unexpected"),
    "weight dtype": (widen_a_weight, "weight wide is DOUBLE, the model FLOAT"),
    "logits dtype": (half_the_logits, "output logits is FLOAT16, not float32"),
}


def test_a_trace_keeps_the_contract(traced: Callable[[str], Any]) -> None:
    assert find_contract_problems(traced("llama")) == []


@pytest.mark.parametrize("name", BREAKERS)
def test_a_broken_contract_is_named(name: str, traced: Callable[[str], Any]) -> None:
    breaker, words = BREAKERS[name]
    model = traced("llama")
    breaker(model)
    assert words in "; ".join(find_contract_problems(model))


def test_the_pass_that_breaks_it_is_named(traced: Callable[[str], Any]) -> None:
    class CacheSwapPass(CountingPass):
        name = "cache-swap"
        reason = "sabotage"

        def rewrite(self, model: ir.Model) -> int:
            swap_caches(model)
            return 1

    passes = default_passes("float32")
    with pytest.raises(CheckFailedError, match=r"after pass cache-swap .*in the place of"):
        run_passes(traced("llama"), [passes[0], CacheSwapPass(), *passes[1:]])


def take_memory(model: ir.Model) -> None:
    next(v for v in model.graph.outputs if v.name == "k_cache_out.0").type = ir.TensorType(ir.DataType.FLOAT16)


def forget_the_logits(model: ir.Model) -> None:
    model.graph.outputs.remove(next(v for v in model.graph.outputs if v.name == "logits"))


@pytest.mark.parametrize(
    ("breaker", "words"),
    [
        (forget_an_input, "reads kv_lens, which nothing in front of it makes"),
        (add_an_input, "mask is not in the contract"),
        (change_a_dtype, "positions is INT32, not int64"),
        (half_the_logits, "logits is FLOAT16, not float32"),
        (forget_the_logits, "there are no logits"),
        (take_memory, "k_cache_out.0 does not fit into the memory of its input"),
    ],
)
def test_a_lowering_that_breaks_it_is_named(
    breaker: Callable[[ir.Model], None], words: str, traced: Callable[[str], Any]
) -> None:
    sabotage = Rewrite("sabotage", "a test", lambda model: int(breaker(model) is None))
    model = traced("llama")
    assert run_lowering(model, operator_passes())["attention-lower"] == 2
    with pytest.raises(CheckFailedError, match=f"after pass sabotage .*{words}"):
        run_lowering(model, [sabotage])


def test_a_vector_with_axes_of_size_one_is_no_matrix() -> None:
    """Rotary frequencies [1, n, 1] stay float32 in a half-precision model."""
    from specexport.passes.contract_check import _check_weights

    values = []
    for name, shape in (("frequencies", (1, 4, 1)), ("matrix", (4, 4)), ("vector", (4,))):
        tensor = ir.tensor(np.zeros(shape, np.float32), name=name)
        values.append(ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor))
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20})
    (problem,) = _check_weights(ir.Model(graph, ir_version=10))
    assert "matrix" in problem
