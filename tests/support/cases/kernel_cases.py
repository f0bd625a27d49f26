"""Cases of the kernels' tests: inputs, and what plain numpy says the result is."""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from specexport.ops.reference import unpadded_attention

TINY_TILES = (16, 16)  # queries and entries: short rows then have several tiles and blocks
# Inputs are exact in their type. What is rounded: the weights before the second product, and the result, each by half a
# unit in the last place (2**-11 for fp16, 2**-8 for bf16, relative); values are below 5 in size.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: rows given as (entries before, new tokens), and tokens that belong to no row."""

    rows: tuple[tuple[int, int], ...]
    padding: int = 3
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    capacity: int = 96
    scale: float = 0.3
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    causal_rows: tuple[int, ...] = ()  # rows of a tree step that have no tree
    dtype: str = "float16"
    splits: int = 1
    tiles: tuple[int, int] | None = TINY_TILES
    seed: int = 3


@dataclass
class Step:
    """What the worker is sent: arrays in float32 or int, and how to run them."""

    case: Case
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers that ``dtype`` has, in float32."""
    import torch

    return torch.from_numpy(array).to(getattr(torch, dtype)).float().numpy()


def random_tree(random: np.random.Generator, nodes: int) -> list[int]:
    """Ancestor bits of each node, its own included, as int64 values; every node's parent comes before it."""
    bits: list[int] = []
    for node in range(nodes):
        parent = int(random.integers(-1, node)) if node else -1
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return [value - (1 << 64) if value >= 1 << 63 else value for value in bits]


def make_step(case: Case) -> Step:
    """Random inputs; NaN in all that must not be read: entries beyond a row's, and queries of padding tokens."""
    from tests.support.cases import chance  # not where steps are only unpickled, in the worker

    random = np.random.default_rng(chance.seed(case.seed))
    new = [count for _, count in case.rows]
    used, total = sum(new), sum(new) + case.padding

    def normal(*shape: int) -> np.ndarray:
        return round_to(random.standard_normal(shape, dtype=np.float32), case.dtype)

    arrays = {
        "q": normal(total, case.heads * case.k_dim),
        "k": normal(total, case.kv_heads * case.k_dim),
        "v": normal(total, case.kv_heads * case.v_dim),
        "k_cache": normal(len(new), 1, case.kv_heads, case.capacity, case.k_dim),
        "v_cache": normal(len(new), 1, case.kv_heads, case.capacity, case.v_dim),
        "kv_lens": np.array([[past] for past, _ in case.rows], np.int32),
        "cu_new_tokens": np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
    }
    arrays["q"][used:] = np.nan
    for b, (past, _) in enumerate(case.rows):
        arrays["k_cache"][b, 0, :, past:] = np.nan
        arrays["v_cache"][b, 0, :, past:] = np.nan
    if case.sinks:
        arrays["sinks"] = normal(case.heads)
    if case.tree:
        trees = [[0] * n if b in case.causal_rows else random_tree(random, n) for b, n in enumerate(new)]
        arrays["tree_mask"] = np.array([*chain(*trees), *[-1] * case.padding], np.int64)
    return Step(case, arrays)


def expected(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [used tokens, Hq*Dv] and both caches; NaN stays where nothing is written."""
    case, arrays = step.case, step.arrays
    used = int(arrays["cu_new_tokens"][-1])
    if not used:
        return np.zeros((0, case.heads * case.v_dim)), arrays["k_cache"], arrays["v_cache"]
    packed = [arrays[name][:used] for name in ("q", "k", "v")]
    rest = [arrays[name] for name in ("k_cache", "v_cache", "kv_lens", "cu_new_tokens")]
    output, keys, values = unpadded_attention(
        *packed, *rest, arrays.get("sinks"),
        num_heads=case.heads, kv_num_heads=case.kv_heads, scale=case.scale, window=case.window, softcap=case.softcap,
    )  # fmt: skip
    if case.tree:
        output = tree_attention(case, arrays, keys, values)
    return output, keys, values


def seen_in_tree(bits: int, offset: int, past: int, window: int) -> list[int]:
    """Entries a token sees: the path from its root, after the committed entries; the window counts along that."""
    own = [node for node in range(offset + 1) if bits == 0 or (node < 64 and bits >> node & 1)]
    path = [*range(past), *(past + node for node in own)]
    return path[-window:] if window > 0 else path


def tree_attention(case: Case, arrays: dict[str, Any], keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of a tree step, one token and one head at a time, given caches that hold the step's entries."""
    cu, past = arrays["cu_new_tokens"], arrays["kv_lens"][:, 0]
    queries = arrays["q"].astype(np.float64).reshape(len(arrays["q"]), case.heads, case.k_dim)
    output = np.zeros((int(cu[-1]), case.heads, case.v_dim))
    for row in range(len(past)):
        for offset, token in enumerate(range(cu[row], cu[row + 1])):
            seen = seen_in_tree(int(arrays["tree_mask"][token]), offset, int(past[row]), case.window)
            for head in range(case.heads):
                group = head * case.kv_heads // case.heads
                scores = keys[row, 0, group, seen] @ queries[token, head] * case.scale
                if case.softcap > 0:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores)
                sink = float(np.exp(arrays["sinks"][head])) if case.sinks else 0.0
                output[token, head] = weights @ values[row, 0, group, seen] / (weights.sum() + sink)
    return output.reshape(len(output), -1)


RAGGED = ((3, 5), (17, 1), (0, 3), (37, 12), (16, 2))
CASES = {
    "ragged": Case(rows=RAGGED),
    "bfloat16": Case(rows=RAGGED, dtype="bfloat16"),
    "permuted_rows": Case(rows=tuple(reversed(RAGGED))),
    "one_token_rows": Case(rows=((4, 1), (90, 1), (0, 1))),
    "one_row_one_token": Case(rows=((0, 1),), padding=0),
    "prefill": Case(rows=((0, 41), (5, 30)), padding=0),
    "empty_rows": Case(rows=((5, 0), (2, 4), (0, 0), (70, 0), (33, 1), (9, 0))),
    "all_rows_empty": Case(rows=((5, 0), (0, 0)), padding=20),
    "much_padding": Case(rows=RAGGED, padding=70),
    "more_rows_than_a_search_block": Case(
        rows=tuple((b % 7, b % 5 % 2) for b in range(70)), heads=2, kv_heads=1, capacity=16
    ),
    "full_rows": Case(rows=((91, 5), (0, 96), (96, 0))),
    "heads_3_to_1": Case(rows=RAGGED, heads=6, kv_heads=2),
    "heads_20_to_1": Case(rows=RAGGED, heads=20, kv_heads=1),
    "head_size_80": Case(rows=RAGGED, k_dim=80, v_dim=80, scale=0.11),
    "head_size_128": Case(rows=RAGGED, k_dim=128, v_dim=128, scale=0.09, dtype="bfloat16"),
    "head_size_256": Case(rows=RAGGED, k_dim=256, v_dim=256, scale=0.06),
    "head_size_5": Case(rows=RAGGED, k_dim=5, v_dim=5),
    "values_smaller": Case(rows=RAGGED, k_dim=24, v_dim=16),
    "values_larger": Case(rows=RAGGED, k_dim=8, v_dim=40),
    "window": Case(rows=RAGGED, window=4),
    "window_of_one": Case(rows=RAGGED, window=1),
    "window_of_a_block": Case(rows=RAGGED, window=16),
    "window_of_blocks": Case(rows=RAGGED, window=37),
    "softcap": Case(rows=RAGGED, softcap=1.5),
    "softcap_saturated": Case(rows=RAGGED, softcap=0.01, scale=40.0),
    "sinks": Case(rows=RAGGED, sinks=True),
    "tree": Case(rows=RAGGED, tree=True),
    "tree_of_64": Case(rows=((20, 64), (0, 64), (30, 1)), tree=True),
    "tree_beside_causal_rows": Case(rows=((20, 9), (0, 70), (30, 5)), tree=True, causal_rows=(1,)),
    "tree_window": Case(rows=RAGGED, tree=True, window=3),
    "tree_window_reaching_back": Case(rows=((20, 64), (0, 30), (41, 9)), tree=True, window=9, causal_rows=(2,)),
    "everything": Case(rows=RAGGED, window=21, softcap=2.0, sinks=True, tree=True, heads=6, k_dim=24, v_dim=20),
    "everything_bfloat16": Case(rows=RAGGED, window=21, softcap=2.0, sinks=True, tree=True, dtype="bfloat16"),
    "tiles_as_shipped": Case(rows=RAGGED, k_dim=64, v_dim=64, scale=0.125, tiles=None),
}


def check(step: Step, found: tuple[np.ndarray, ...]) -> None:
    """Output of real tokens close, of padding tokens zero; the caches equal bit by bit, NaN where nothing belongs."""
    wanted = expected(step)
    used = len(wanted[0])
    tolerance = TOLERANCE[step.case.dtype]
    np.testing.assert_allclose(found[0][:used], wanted[0], atol=tolerance, rtol=tolerance)
    assert not found[0][used:].any()
    for cache, written in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(cache, written)
