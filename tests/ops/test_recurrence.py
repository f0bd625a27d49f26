"""The torch ops and the lowering of the recurrences against their plain reference."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.lowering.recurrence import lower_recurrences
from specexport.ops.onnx_op import register_schema
from specexport.ops.reference import causal_conv, linear_attention
from specexport.ops.spec import CAUSAL_CONV, LINEAR_ATTENTION, RECURRENCES
from specexport_runtime.abi import OP_DOMAIN
from tests.support.cases import chance
from tests.support.references.engine_harness import indices_of
from tests.support.references.sessions import session_of

PENDING = 7
OPS = {LINEAR_ATTENTION.name: (LINEAR_ATTENTION, linear_attention), CAUSAL_CONV.name: (CAUSAL_CONV, causal_conv)}


@dataclass(frozen=True)
class Case:
    """One call: of each row (pending for good, pending drafts, tokens for good, draft tokens)."""

    rows: tuple[tuple[int, int, int, int], ...]
    kind: str = LINEAR_ATTENTION.name
    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (8, 16)
    decay: str = "head"
    beta: bool = True
    silu: bool = True
    bias: bool = True


RAGGED = ((2, 0, 1, 4), (0, 0, 1, 0), (0, 0, 0, 0), (3, 0, 6, 2), (0, 0, 9, 0))
DRAFTING = ((1, 0, 1, 0), (2, 1, 0, 1), (0, 4, 0, 1), (0, 0, 0, 2))
CONV = {"kind": CAUSAL_CONV.name}
CASES = {
    "gated_delta": Case(RAGGED), "gated_delta_drafting": Case(DRAFTING),
    "gated_delta_of_channels": Case(RAGGED, decay="channel", heads=(4, 4)), "delta": Case(RAGGED, decay=""),
    "state_space": Case(RAGGED, beta=False, heads=(1, 4)),
    "selective": Case(RAGGED, beta=False, decay="channel", heads=(1, 12), dims=(8, 1)),
    "plain": Case(RAGGED, beta=False, decay=""), "one_row": Case(((0, 0, 30, 0),)), "conv": Case(RAGGED, **CONV),
    "conv_drafting": Case(DRAFTING, **CONV), "conv_plain": Case(RAGGED, **CONV, silu=False, bias=False),
}  # fmt: skip


def make_inputs(case: Case) -> dict[str, np.ndarray]:
    """All inputs of the op. What a row must not read (pending entries that nobody counts) is NaN."""
    random = np.random.default_rng(chance.seed(5))
    steps = np.array(case.rows, np.int64)
    new, rows = (steps[:, 2] + steps[:, 3]).tolist(), len(steps)
    total, indices = sum(new), indices_of([0] * rows, new)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    inputs: dict[str, np.ndarray] = {}
    if case.kind == LINEAR_ATTENTION.name:
        (query_heads, heads), (k_dim, v_dim) = case.heads, case.dims
        keys = normal(total, heads, k_dim)
        inputs["q"] = normal(total, query_heads * k_dim)
        inputs["k"] = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(total, -1)
        inputs["v"] = normal(total, heads * v_dim)
        if case.decay:
            inputs["decay"] = -np.abs(normal(total, heads * (k_dim if case.decay == "channel" else 1)))
        if case.beta:
            inputs["beta"] = random.uniform(size=(total, heads)).astype(np.float32)
        inputs["state"] = normal(rows, 1, heads, k_dim, v_dim)
        size = sum(value.shape[1] for name, value in inputs.items() if name != "state")
    else:
        size, taps = 24, 4
        inputs["x"] = normal(total, size)
        inputs["weight"] = normal(size, 1, taps)
        if case.bias:
            inputs["bias"] = normal(size)
        inputs["state"] = normal(rows, 1, taps - 1, size)
    pending = np.full((rows, 1, PENDING, size), np.nan, np.float32)
    for row, (settled, drafts, _, _) in enumerate(case.rows):
        given = normal(settled + drafts, size)
        if "beta" in inputs or "decay" in inputs:
            given[:, -inputs["v"].shape[1] :] = -np.abs(given[:, -inputs["v"].shape[1] :]) * 0.3
        pending[row, 0, : settled + drafts] = given
    names = ("cu_new_tokens", "row_starts", "pad_index", "unpad_index")
    return inputs | {"pending": pending, "state_steps": steps} | {name: indices[name] for name in names}


def attributes(case: Case) -> dict[str, Any]:
    if case.kind == CAUSAL_CONV.name:
        return {"silu": int(case.silu)}
    return {"num_heads": case.heads[0], "kv_num_heads": case.heads[1], "scale": 0.3}


def expected(case: Case, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    spec, reference = OPS[case.kind]
    names = [item.name for item in spec.inputs if item.name not in ("row_starts", "pad_index", "unpad_index")]
    return list(reference(*(inputs.get(name) for name in names), **attributes(case)))


def check(case: Case, inputs: dict[str, np.ndarray], found: list[np.ndarray]) -> None:
    """Output, states and the pending entries that count are those of the reference."""
    output, states, waiting = expected(case, inputs)
    np.testing.assert_allclose(found[0], output, atol=2e-5)
    np.testing.assert_allclose(found[1], states, atol=2e-5)
    for row, (_, drafts, _, drafted) in enumerate(case.rows):
        counted = slice(0, drafts + drafted)
        np.testing.assert_array_equal(found[2][row, 0, counted], waiting[row, 0, counted].astype(np.float32))
    idle = [row for row, steps in enumerate(case.rows) if not any(steps)]
    np.testing.assert_array_equal(found[1][idle], inputs["state"][idle])
    np.testing.assert_array_equal(found[2][idle], inputs["pending"][idle])


@pytest.mark.parametrize("name", CASES)
def test_torch_op_is_the_reference(name: str) -> None:
    import torch

    import specexport.ops.torch_ops  # noqa: F401

    case = CASES[name]
    inputs = make_inputs(case)
    spec = OPS[case.kind][0]
    tensors = [torch.from_numpy(inputs[i.name]) if i.name in inputs else None for i in spec.inputs]
    given = attributes(case)
    op = getattr(torch.ops.specexport, spec.torch_name)
    check(case, inputs, [x.numpy() for x in op(*tensors, *(given[each.name] for each in spec.attributes))])


class Lowered:
    def __init__(self, case: Case, inputs: dict[str, np.ndarray]) -> None:
        self.spec = OPS[case.kind][0]
        for spec in RECURRENCES:
            register_schema(spec)

        def value(item: Any) -> ir.Value:
            shape: list[Any] = [f"{item.name}.{axis}" for axis in range(inputs[item.name].ndim)]
            if item.name not in ("cu_new_tokens", "row_starts", "pad_index", "unpad_index", "state_steps"):
                shape[1:] = inputs[item.name].shape[1:]
                shape[2:3] = ["S"] if item.name == "pending" else shape[2:3]
            dtype = ir.DataType.from_numpy(inputs[item.name].dtype)
            return ir.Value(name=item.name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

        read = [value(item) if item.name in inputs else None for item in self.spec.inputs]
        by_name = {each.name: each for each in read if each is not None}
        made = []
        for item in self.spec.outputs:
            source = by_name.get(item.name.removesuffix("_out"))
            made.append(
                ir.Value(name=item.name, shape=source.shape if source else None, type=ir.TensorType(ir.DataType.FLOAT))
            )
        node = ir.node(self.spec.name, read, domain=OP_DOMAIN, attributes=attributes(case), outputs=made, name="it")
        graph = ir.Graph(list(by_name.values()), made, nodes=[node], opset_imports={"": 23, OP_DOMAIN: 1}, name="g")
        model = ir.Model(graph, ir_version=10)
        assert lower_recurrences(model) == 1
        self.session = session_of(model)
        self.names = {each.name for each in self.session.get_inputs()}

    def run(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        io, kept = self.session.io_binding(), {name: inputs[name].copy() for name in ("state", "pending")}
        for name in self.names - set(kept):
            io.bind_cpu_input(name, np.ascontiguousarray(inputs[name]))
        io.bind_output("output", "cpu")
        for name, array in kept.items():
            bound = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
            io.bind_input(name, *bound)
            io.bind_output(f"{name}_out", *bound)
        self.session.run_with_iobinding(io)
        return [io.get_outputs()[0].numpy(), kept["state"], kept["pending"]]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
def test_lowered_op_is_the_reference_in_place(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    check(case, inputs, Lowered(case, inputs).run(inputs))


@pytest.mark.parametrize("name", ["gated_delta", "selective", "state_space", "conv"])
def test_a_token_has_the_same_bits_at_every_width_as_draft_and_for_good(name: str) -> None:
    case = CASES[name]
    tokens = replace(case, rows=((0, 0, 8, 0),))
    whole = make_inputs(tokens)
    lowered = Lowered(tokens, whole)
    wanted, state, _ = lowered.run(whole)

    per_token = {"q", "k", "v", "decay", "beta", "x"} & set(whole)
    found, kept, at, waits = [], {key: whole[key] for key in ("state", "pending")}, 0, 0
    # One token, then a verify step of which two drafts are accepted, then a draft at a time, then the rest.
    for settled, drafts, certain, drafted, accepted in [
        (0, 0, 1, 0, 0),
        (0, 0, 1, 3, 2),
        (2, 0, 0, 1, 1),
        (0, 1, 0, 1, 2),
        (2, 0, 2, 0, 0),
    ]:
        assert settled + drafts == waits
        count = certain + drafted
        steps = make_inputs(replace(case, rows=((settled, drafts, certain, drafted),)))
        steps |= {key: whole[key][at : at + count] for key in per_token} | kept
        steps |= {key: whole[key] for key in ("weight", "bias") if key in whole}
        output, *after = lowered.run(steps)
        kept = dict(zip(("state", "pending"), after, strict=True))
        gone_on = certain + accepted - drafts if drafted else certain
        found.append(output[: max(gone_on, 0)])
        at, waits = at + max(gone_on, 0), accepted
    np.testing.assert_array_equal(np.concatenate(found), wanted[: len(np.concatenate(found))])
    assert at == len(wanted)
    np.testing.assert_array_equal(kept["state"], state)
