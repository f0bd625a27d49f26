"""Steps of ``UnpaddedAttention``: inputs, a model of one node, and what plain numpy says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.ops import UNPADDED_ATTENTION
from specexport.ops.onnx_op import register_schema
from specexport.ops.reference import unpadded_attention
from tests.support.cases import chance
from tests.support.references.engine_harness import indices_of

CAPACITY = 48
SPAN = 51  # entries that kv_positions describes: at least every row's total


@dataclass(frozen=True)
class Case:
    """One call: rows given as (past, new tokens); ``padding`` says which past entries of each row are padding."""

    rows: tuple[tuple[int, int], ...]
    padding: tuple[tuple[int, ...], ...] = ()
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    scale: float = 0.3
    causal: int = 1
    appends: bool = True


RAGGED = ((3, 5), (17, 1), (0, 3), (30, 12))
CASES = {
    "ragged": Case(RAGGED),
    "one_token_rows": Case(((4, 1), (9, 1), (0, 1))),
    "one_row_prefill": Case(((0, 21),)),
    "empty_rows": Case(((5, 0), (2, 4), (0, 0), (7, 0))),
    "permuted_rows": Case(tuple(reversed(RAGGED))),
    "multi_query": Case(RAGGED, kv_heads=1),
    "window": Case(RAGGED, window=4),
    "window_of_one": Case(RAGGED, window=1),
    "window_wider_than_past": Case(RAGGED, window=100),
    "softcap": Case(RAGGED, softcap=1.5),
    "sinks": Case(RAGGED, sinks=True),
    "everything": Case(RAGGED, window=5, softcap=2.0, sinks=True),
    "odd_head_size": Case(RAGGED, k_dim=20, v_dim=20),
    "tiny_head_size": Case(RAGGED, k_dim=5, v_dim=5, window=3),
    "large_head_size": Case(((2, 3), (0, 5)), k_dim=256, v_dim=256),
    "values_smaller": Case(RAGGED, k_dim=24, v_dim=16),
    "values_larger": Case(RAGGED, k_dim=8, v_dim=32, kv_heads=4),
    "values_smaller_everything": Case(RAGGED, k_dim=24, v_dim=16, window=4, softcap=1.5, sinks=True),
    # One row's long chunk beside rows at the very end of their capacity: each may write its own tokens only.
    "full_row_beside_chunk": Case(((0, 30), (47, 1), (40, 8), (46, 2))),
    "full_idle_row_beside_chunk": Case(((0, 30), (47, 0), (44, 4))),
    "every_row_full": Case(((45, 3), (45, 3), (0, 3))),
    "one_token_among_idle_rows": Case(((5, 0), (7, 1), (9, 0))),
}


def make_inputs(case: Case, poison: float = np.nan) -> dict[str, np.ndarray]:
    """All inputs of the op; cache entries that must not be read hold ``poison``."""
    random = np.random.default_rng(chance.seed(3))
    past, new = zip(*case.rows, strict=True)
    total = sum(new)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    inputs = indices_of(past, new) | {
        "q": normal(total, case.heads * case.k_dim),
        "k": normal(total, case.kv_heads * case.k_dim),
        "v": normal(total, case.kv_heads * case.v_dim),
        "k_cache": normal(len(new), 1, case.kv_heads, CAPACITY, case.k_dim),
        "v_cache": normal(len(new), 1, case.kv_heads, CAPACITY, case.v_dim),
    }
    for b, length in enumerate(past):
        inputs["k_cache"][b, 0, :, length:] = poison
        inputs["v_cache"][b, 0, :, length:] = poison
    if case.sinks:
        inputs["sinks"] = normal(case.heads)
    if case.slopes:
        inputs["slopes"] = np.abs(normal(case.heads))
    return inputs | make_positions(case)


def make_positions(case: Case) -> dict[str, np.ndarray]:
    """``positions`` and ``kv_positions`` of a padded-KV graph: positions count the entries that are no padding."""
    kv_positions = np.full((len(case.rows), 1, SPAN), -1, np.int64)
    positions = []
    for b, (past, new) in enumerate(case.rows):
        padding = set(case.padding[b]) if case.padding else set()
        real = [entry for entry in range(past + new) if entry not in padding]
        kv_positions[b, 0, real] = np.arange(len(real))
        positions += [len(real) - new + j for j in range(new)]
    return {"positions": np.array(positions, np.int64), "kv_positions": kv_positions}


def attributes(case: Case) -> dict[str, Any]:
    return {
        "num_heads": case.heads, "kv_num_heads": case.kv_heads, "scale": case.scale, "window": case.window,
        "softcap": case.softcap, "causal": case.causal,
    }  # fmt: skip


def expect(
    case: Case, inputs: dict[str, np.ndarray], *, padded_kv: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    names = ("q", "k", "v", "k_cache", "v_cache", "kv_lens", "cu_new_tokens")
    more = {name: inputs[name] for name in ("positions", "kv_positions")} if padded_kv else {}
    given = [inputs[name] if name in given_names(case) else None for name in names]
    return unpadded_attention(*given, inputs.get("sinks"), inputs.get("slopes"), **attributes(case), **more)


def given_names(case: Case) -> set[str]:
    """Names of the inputs that are not absent."""
    given = {"sinks": case.sinks, "slopes": case.slopes, "k": case.appends, "v": case.appends}
    return {item.name for item in UNPADDED_ATTENTION.inputs if given.get(item.name, True)}


def one_node_model(case: Case, dtype: str = "float32") -> ir.Model:
    """A model of one UnpaddedAttention node, with floats of a type."""
    register_schema()
    floats = ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())]
    kinds = {"int32": ir.DataType.INT32, "int64": ir.DataType.INT64}
    sizes = {"Hq*D": case.heads * case.k_dim, "H*D": case.kv_heads * case.k_dim, "H*Dv": case.kv_heads * case.v_dim}
    sizes |= {"Hq*Dv": case.heads * case.v_dim, "H": case.kv_heads, "D": case.k_dim, "Dv": case.v_dim, "Hq": case.heads}

    def value(item: Any) -> ir.Value:
        return ir.Value(
            name=item.name,
            type=ir.TensorType(kinds.get(item.dtype, floats)),
            shape=ir.Shape([sizes.get(word, word) for word in item.shape]),
        )

    given = given_names(case)
    read = [value(item) if item.name in given else None for item in UNPADDED_ATTENTION.inputs]
    inputs = [item for item in read if item is not None]
    outputs = [value(item) for item in UNPADDED_ATTENTION.outputs]
    node = ir.node(
        UNPADDED_ATTENTION.name, read, domain=UNPADDED_ATTENTION.domain, attributes=attributes(case), outputs=outputs
    )
    positions = ir.Value(name="positions", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))
    graph = ir.Graph(
        [*inputs, positions],
        outputs if case.appends else outputs[:1],
        nodes=[node],
        opset_imports={"": 23, "specexport": 1},
        name="one_node",
    )
    return ir.Model(graph, ir_version=10)
