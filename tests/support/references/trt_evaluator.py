"""TensorRT's KV-cache update and attention in numpy: what its documentation leaves undefined is an error or NaN."""

from collections.abc import Sequence
from typing import Any

import numpy as np

NAN = np.nan
Array = np.ndarray


def _kv_cache_update(cache: Array, update: Array, write_indices: Array, lengths: Array, **attributes: Any) -> Array:
    assert attributes == {"update_form": "packed_nhd", "mode": "linear"}, attributes
    batch, heads, capacity, size = cache.shape
    tokens = len(update)
    assert update.shape == (tokens, heads, size)
    assert update.dtype == cache.dtype
    for indices, length in ((write_indices, batch), (lengths, batch + 1)):
        assert (indices.shape, indices.dtype) == ((length,), np.int32)
    assert (lengths[0], lengths[-1]) == (0, tokens), "the last cumulative length is the number of tokens"
    assert (np.diff(lengths) >= 0).all()
    result = cache.copy()
    for row, start in enumerate(write_indices):
        own = update[lengths[row] : lengths[row + 1]]
        assert start >= 0
        assert start + len(own) <= capacity, "a write beyond the capacity"
        result[row, :, start : start + len(own)] = own.swapaxes(0, 1)
    return result


def _hidden(row: int, head: int, slot: int, width: int, length: int, capacity: int, mask: Array | None) -> Array:
    """What is added to a slot's scores: 0, or -inf where it does not see. With a mask, lengths are not read."""
    if mask is None:
        return np.zeros(max(0, length - width + slot + 1))
    assert mask.shape[-1] == capacity
    return np.where(mask[row, head % mask.shape[1], slot], 0, -np.inf)


def _attention(
    queries: Array, keys: Array, values: Array, mask: Array | None, query_lengths: None = None,
    kv_lengths: Array | None = None, *, fused_dtypes: Sequence[str], **attributes: Any,
) -> Array:  # fmt: skip
    assert attributes.pop("TRT_decomposable") == 0
    assert attributes == ({"causal_kind": "lower_right"} if mask is None else {}), attributes
    assert query_lengths is None, "padded queries have no lengths"
    batch, heads, width, size = queries.shape
    kv_heads, capacity = keys.shape[1:3]
    assert keys.shape == values.shape == (batch, kv_heads, capacity, size)
    assert heads % kv_heads == 0
    assert size % 8 == 0
    assert 16 <= size <= 256, "no fused kernel"
    assert queries.dtype == keys.dtype == values.dtype
    assert str(queries.dtype) in fused_dtypes
    if kv_lengths is None:
        assert mask is not None, "nothing says what is seen"
        kv_lengths = np.full(batch, capacity, np.int32)
    assert (kv_lengths.shape, kv_lengths.dtype) == ((batch,), np.int32)
    assert (kv_lengths >= 1).all()
    assert (kv_lengths <= capacity).all()
    assert mask is None or mask.dtype == bool
    assert mask is None or mask.shape in ((batch, 1, width, capacity), (batch, heads, width, capacity))
    result = np.full(queries.shape, NAN)
    for row, head, slot in np.ndindex(batch, heads, width):
        added = _hidden(row, head, slot, width, int(kv_lengths[row]), capacity, mask)
        if len(added):
            seen_keys, seen_values = (
                cache[row, head * kv_heads // heads, : len(added)].astype(np.float64) for cache in (keys, values)
            )
            scores = seen_keys @ queries[row, head, slot].astype(np.float64) + added
            weights = np.exp(scores - scores.max())
            result[row, head, slot] = weights @ seen_values / weights.sum()
    return result.astype(queries.dtype)


def _operators(fused_dtypes: Sequence[str]) -> list[type]:
    from onnx.reference.op_run import OpRun

    class TRT_KVCacheUpdate(OpRun):
        op_domain = ""

        def _run(self, *inputs: Any, **_: Any) -> tuple[np.ndarray]:
            return (_kv_cache_update(*inputs, **attributes_of(self)),)

    class TRT_Attention(OpRun):
        op_domain = ""

        def _run(self, *inputs: Any, **_: Any) -> tuple[np.ndarray]:
            return (_attention(*inputs, fused_dtypes=fused_dtypes, **attributes_of(self)),)

    return [TRT_KVCacheUpdate, TRT_Attention]


def attributes_of(operator: Any) -> dict[str, Any]:
    import onnx

    own = {item.name: onnx.helper.get_attribute_value(item) for item in operator.onnx_node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in own.items()}


def make_evaluator(model: Any, fused_dtypes: Sequence[str] = ("float16", "bfloat16")) -> Any:
    """A ``ReferenceEvaluator`` of a lowered model; ``fused_dtypes``: for which attention has a fused kernel."""
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(ir.to_proto(model), new_ops=_operators(fused_dtypes))


def align(pasts: Sequence[int], counts: Sequence[int], *, width: int = 0) -> dict[str, np.ndarray]:
    """The index inputs of a step with right-aligned rows, all slots of a tile as wide as the caller likes."""
    width = width or max(counts)
    cu = np.concatenate([[0], np.cumsum(counts)])
    tile = np.full((len(counts), width), cu[-1] - 1)  # slots before a row's first token hold some other token
    untile = []
    for row, count in enumerate(counts):
        first = width - count
        tile[row, first:] = np.arange(cu[row], cu[row + 1])
        untile += [row * width + first + j for j in range(count)]
    lens = np.array(pasts, np.int32)[:, None]
    return {
        "kv_lens": lens,
        "cu_new_tokens": cu.astype(np.int32),
        "row_totals": np.maximum(lens + np.array(counts, np.int32)[:, None], 1),
        "tile_index": tile.astype(np.int64),
        "untile_index": np.array(untile, np.int64),
    }


class Engine:
    make_evaluator = staticmethod(make_evaluator)

    def __init__(self, model: Any, num_rows: int, *, poison: float = NAN, **how: Any) -> None:
        self.evaluator = self.make_evaluator(model, **how)
        self.inputs = {str(value.name) for value in model.graph.inputs}
        self.caches = {
            str(value.name): np.full((num_rows, *value.shape[1:]), poison, value.dtype.numpy())
            for value in model.graph.inputs
            if "cache" in str(value.name)
        }

    def step(
        self, tokens: Sequence[Sequence[int]], pasts: Sequence[int], *, first_row: int = 0, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """(logits [T, V], token_ids [T]) of the new tokens of rows ``first_row …``; caches are updated in place."""
        counts = [len(row) for row in tokens]
        rows = slice(first_row, first_row + len(tokens))
        feeds = align(pasts, counts, width=width) | {
            "input_ids": np.array([token for row in tokens for token in row], np.int64),
            "positions": np.array(
                [past + j for past, n in zip(pasts, counts, strict=True) for j in range(n)], np.int64
            ),
            "logit_rows": np.arange(sum(counts), dtype=np.int64),
        }
        feeds = {name: array for name, array in feeds.items() if name in self.inputs}
        feeds |= {name: cache[rows] for name, cache in self.caches.items()}
        with np.errstate(all="ignore"):  # padding slots may hold NaN
            outputs = dict(zip(self.evaluator.output_names, self.evaluator.run(None, feeds), strict=True))
        for name, cache in self.caches.items():
            cache[rows] = outputs[name.replace("_cache.", "_cache_out.")]
        return outputs["logits"], outputs["token_ids"]
