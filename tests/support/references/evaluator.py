"""The plugin's ops in numpy, with the checks that TensorRT and the kernels do not make, for lowered graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specexport.kernels.spec import KernelSpec
from specexport.ops.reference import unpadded_attention
from specexport.plugin.naming import plugin_names, plugin_spec
from tests.support.references.trt_evaluator import Engine, attributes_of

ATTRIBUTES = {"plugin_namespace": "specexport", "plugin_version": "1", "aot": 1}
Op = Callable[[KernelSpec, list[np.ndarray]], Sequence[np.ndarray]]


def kv_append(spec: KernelSpec, inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    k, v, k_cache, v_cache, lens, cu = inputs
    check_rows(spec, k_cache, v_cache, lens, cu, len(k))
    assert k.shape == (len(k), spec.kv_num_heads * spec.head_size)
    assert v.shape == (len(k), spec.kv_num_heads * spec.v_head_size)
    caches = k_cache.copy(), v_cache.copy()
    for row, past in enumerate(lens[:, 0]):
        new = slice(cu[row], cu[row + 1])
        for given, cache in zip((k, v), caches, strict=True):
            block = given.reshape(len(k), spec.kv_num_heads, -1)[new].swapaxes(0, 1)
            cache[row, :, past : past + block.shape[1]] = block
    return caches


def check_rows(
    spec: KernelSpec, k_cache: np.ndarray, v_cache: np.ndarray, lens: np.ndarray, cu: np.ndarray, tokens: int
) -> None:
    rows, heads, capacity, size = k_cache.shape
    assert (heads, size) == (spec.kv_num_heads, spec.head_size)
    assert v_cache.shape == (rows, heads, capacity, spec.v_head_size)
    assert (lens.shape, lens.dtype) == ((rows, 1), np.int32)
    assert (cu.shape, cu.dtype) == ((rows + 1,), np.int32)
    assert cu[0] == 0
    assert cu[-1] <= tokens
    assert (lens[:, 0] + np.diff(cu) <= capacity).all()


def ragged_attention(spec: KernelSpec, inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    q, k_cache, v_cache, lens, cu = inputs[:5]
    (sinks,) = inputs[5:] if spec.sinks else (None,)
    assert len(inputs) == 5 + spec.sinks
    check_rows(spec, k_cache, v_cache, lens, cu, len(q))
    assert q.shape == (len(q), spec.num_heads * spec.head_size)
    assert sinks is None or sinks.shape == (spec.num_heads,)
    if spec.num_splits > 1:
        return partial_sums(spec, inputs)
    new = [
        np.concatenate([cache[row, :, past : past + n].swapaxes(0, 1) for row, past, n in rows_of(lens, cu)])
        for cache in (k_cache, v_cache)
    ]
    output, _, _ = unpadded_attention(
        q, *(entries.reshape(len(entries), -1) for entries in new), k_cache[:, None], v_cache[:, None], lens, cu, sinks,
        num_heads=spec.num_heads, kv_num_heads=spec.kv_num_heads,
        scale=spec.scale, window=spec.window, softcap=spec.softcap,
    )  # fmt: skip
    return (output.astype(q.dtype),)


def rows_of(lens: np.ndarray, cu: np.ndarray) -> list[tuple[int, int, int]]:
    return [(row, int(past), int(n)) for row, (past, n) in enumerate(zip(lens[:, 0], np.diff(cu), strict=True))]


def partial_sums(spec: KernelSpec, inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    """Sum, maximum and weight of each split, in base 2; NaN where the kernel writes nothing."""
    q, k_cache, v_cache, lens, cu, *more = inputs
    queries = q.astype(np.float64).reshape(len(q), spec.num_heads, -1)
    shape = (spec.num_splits, len(q), spec.num_heads)
    acc, stats = np.full((*shape, spec.v_head_size), np.nan), np.zeros((*shape, 2))
    stats[..., 0] = -np.inf
    for row, past, count in rows_of(lens, cu):
        for offset, head, split in np.ndindex(count, spec.num_heads, spec.num_splits):
            end, token = past + offset + 1, cu[row] + offset
            begin = max(0, end - spec.window) if spec.window > 0 else 0
            seen = np.array_split(np.arange(begin, end), spec.num_splits)[split]
            keys, values = (cache[row, head // spec.group, seen].astype(np.float64) for cache in (k_cache, v_cache))
            scores = keys @ queries[token, head] * spec.scale
            scores = spec.softcap * np.tanh(scores / spec.softcap) if spec.softcap > 0 else scores
            values = np.concatenate([values, np.zeros((1, values.shape[1]))])
            sink = float(more[0][head]) if more and split == 0 else -np.inf
            scores = np.append(scores, sink) * np.log2(np.e)
            if (top := scores.max()) > -np.inf:
                weights = np.exp2(scores - top)
                acc[split, token, head], stats[split, token, head] = weights @ values, (top, weights.sum())
    return acc.astype(np.float32), stats.astype(np.float32)


def combine_splits(spec: KernelSpec, inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    acc, stats = inputs
    assert acc.dtype == stats.dtype == np.float32
    assert stats.shape == (*acc.shape[:3], 2)
    assert acc.shape[0] == spec.num_splits
    used = stats[..., 1] > 0
    top = np.where(used, stats[..., 0], -np.inf).max(0)
    factor = np.where(used, np.exp2(stats[..., 0] - np.where(top > -np.inf, top, 0)), 0)
    weight = (stats[..., 1] * factor).sum(0)
    total = (np.where(used[..., None], acc, 0) * factor[..., None]).sum(0)
    result = total / np.where(weight > 0, weight, 1)[..., None]
    import ml_dtypes

    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[spec.dtype]
    return (result.reshape(len(result), -1).astype(dtype),)


OPS: dict[str, Op] = {"kv_append": kv_append, "ragged_attention": ragged_attention, "combine_splits": combine_splits}


def make_evaluator(model: Any, ops: dict[str, Op] = OPS) -> Any:
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    def make(name: str) -> type:
        spec = plugin_spec(name)

        def run(self: Any, *inputs: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
            assert attributes_of(self) == ATTRIBUTES
            for item, array in zip(spec.signature.inputs, inputs, strict=True):
                assert str(array.dtype) == (spec.dtype if item.dtype == "model" else item.dtype), item.name
            return tuple(ops[spec.kernel](spec, list(inputs)))

        return type(name, (OpRun,), {"op_domain": "", "_run": run})

    return ReferenceEvaluator(ir.to_proto(model), new_ops=[make(name) for name in plugin_names(model)])


class PluginEngine(Engine):
    make_evaluator = staticmethod(make_evaluator)
