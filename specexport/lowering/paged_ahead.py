"""Attention whose tokens see later ones of their row, over a pool of cache blocks, in standard operators.

``PagedAttention`` is causal, and so are ONNX Runtime's other fused kernels over caches. Draft heads that fill a block
have such layers (``causal=0``): all of a row's entries are seen from each of its new tokens. So new keys and values are
scattered into the blocks that the table names, a row's blocks are gathered, and scores, mask and softmax are written
out. Whole rows are copied for that, in every such layer; a head has few of them, and its rows are as long as the
target's, whose weights are read beside them.

No size depends on a value and nothing is asked of the host, so that a CUDA graph can hold it.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport.onnx_emit import Emitter
from specexport_runtime.abi import KV_LENS, PAD_INDEX, ROW_TOTALS, UNPAD_INDEX, LayerGeometry
from specexport_runtime.executors.paged import BLOCK_ENTRIES, BLOCK_TABLE

if TYPE_CHECKING:
    import onnx_ir as ir

_HIDDEN = -1.0e30  # weight exactly zero beside any real score, and finite: no inf minus inf


class PagedRows(NamedTuple):
    """What every such layer needs of the step, computed once."""

    table: "ir.Value"  # blocks of each row [B, N], int64
    at: "ir.Value"  # block and place in it of each new token [T, 2], int64
    slots: "ir.Value"  # entry of each slot of the tile [B, Q], int64
    entries: "ir.Value"  # numbers of a row's entries [B, 1, 1, N*256], int64
    totals: "ir.Value"  # entries of each row after the step [B, 1, 1, 1], int64
    filled: "ir.Value"  # which entries hold a token [B, N*256, 1, 1]
    tile: "ir.Value"  # token of each slot [B, Q]
    untile: "ir.Value"  # slot of each token [T]


def emit_paged_rows(emit: Emitter, inputs: "dict[str, ir.Value]") -> PagedRows:
    """What of the step all layers need, from ``inputs`` by name (with ``block_table``); nodes are left to be placed."""
    import onnx_ir as ir

    whole = ir.DataType.INT64
    table, past, totals = (emit.cast(inputs[spec.name], whole) for spec in (BLOCK_TABLE, KV_LENS, ROW_TOTALS))
    pad, untile, one = inputs[PAD_INDEX.name], inputs[UNPAD_INDEX.name], emit.const(1)
    tile = emit.op("Squeeze", pad, emit.const([1]))
    # Sums of ones count along an axis without asking for its size.
    within = emit.op("Sub", _count(emit, tile), one)
    slots = emit.op("Min", emit.op("Add", past, within), emit.op("Sub", totals, one))
    size = emit.const(BLOCK_ENTRIES)
    block = emit.op("GatherElements", table, emit.op("Div", slots, size), axis=1)
    pair = [
        emit.op("Unsqueeze", emit.op("Gather", emit.reshape(each, [-1]), untile, axis=0), emit.const([1]))
        for each in (block, emit.op("Mod", slots, size))
    ]
    first = emit.op("Mul", emit.op("Sub", _count(emit, table), one), size)
    inner = emit.const(np.arange(BLOCK_ENTRIES).reshape(1, 1, -1))
    entries = emit.reshape(emit.op("Add", emit.op("Unsqueeze", first, emit.const([2])), inner), [0, 1, 1, -1])
    at, ends = emit.op("Concat", *pair, axis=1), emit.reshape(totals, [-1, 1, 1, 1])
    filled = emit.op("Less", emit.reshape(entries, [0, -1, 1, 1]), ends)
    return PagedRows(table, at, slots, entries, ends, filled, tile, untile)


def _count(emit: Emitter, like: "ir.Value") -> "ir.Value":
    """1, 2, 3 … along the last of two axes."""
    ones = emit.op("Add", emit.op("Mul", like, emit.const(0)), emit.const(1))
    return emit.op("CumSum", ones, emit.const(1))


def emit_append(emit: Emitter, rows: PagedRows, cache: "ir.Value", tokens: "ir.Value", heads: int) -> "ir.Value":
    """The pool ``cache`` [blocks, 256, H, D] with ``tokens`` [T, H*D] at their places."""
    size = int(cache.shape[3])  # type: ignore[index, arg-type]
    return emit.op("ScatterND", cache, rows.at, emit.reshape(tokens, [-1, heads, size]), shape=cache.shape)


def emit_ahead(
    emit: Emitter,
    rows: PagedRows,
    queries: "ir.Value",
    keys: "ir.Value",
    values: "ir.Value",
    *,
    geometry: LayerGeometry,
    num_heads: int,
    scale: float,
    window: int,
) -> "ir.Value":
    """Attention of each new token over all entries of its row; returns [T, Hq*D].

    Queries are [T, Hq*D]; the pools hold this step's entries. ``window`` is entries that a token sees, itself included.
    """
    import onnx_ir as ir

    heads, size, dtype = geometry.kv_heads, int(keys.shape[3]), keys.dtype  # type: ignore[index, arg-type]
    # In float32 and rounded once, as the other lowerings of half precision do: products of unscaled heads may overflow.
    exact = emit.op("Mul", emit.cast(queries, ir.DataType.FLOAT), emit.const(scale, "float32"))
    scaled = exact if dtype is None else emit.cast(exact, dtype)
    tile = emit.op("Gather", scaled, rows.tile, axis=0)  # [B, Q, Hq*D]
    group = num_heads // heads
    split = emit.reshape(tile, [0, 0, heads, group * size])
    folded = emit.reshape(emit.op("Transpose", split, perm=[0, 2, 1, 3]), [0, 0, -1, size])  # [B, H, Q*G, D]
    turned = emit.op("Transpose", _row_entries(emit, rows, keys, heads, size), perm=[0, 2, 3, 1])
    scores = emit.cast(emit.op("MatMul", folded, turned), ir.DataType.FLOAT)  # [B, H, Q*G, L]
    seen = emit.op("Less", rows.entries, rows.totals)
    if window > 0:
        own = emit.op("Tile", emit.op("Unsqueeze", rows.slots, emit.const([2])), emit.const([1, 1, group]))
        before = emit.op("Sub", emit.reshape(own, [0, 1, -1, 1]), emit.const(window))
        seen = emit.op("And", seen, emit.op("Greater", rows.entries, before))
    shown = emit.op("Where", seen, scores, emit.const(_HIDDEN, "float32"))
    weights = emit.op("Softmax", shown, axis=-1)
    weights = weights if dtype is None else emit.cast(weights, dtype)
    # What a sequence that is gone left behind may be NaN, and 0 times NaN is NaN.
    held = emit.op("Where", rows.filled, _row_entries(emit, rows, values, heads, size), emit.const(0, "float32"))
    held = emit.op("Transpose", held, perm=[0, 2, 1, 3])
    mixed = emit.op("MatMul", weights, held)  # [B, H, Q*G, D]
    by_slot = emit.op("Transpose", emit.reshape(mixed, [0, 0, -1, group * size]), perm=[0, 2, 1, 3])
    return emit.op("Gather", emit.reshape(by_slot, [-1, heads * group * size]), rows.untile, axis=0)


def _row_entries(emit: Emitter, rows: PagedRows, pool: "ir.Value", heads: int, size: int) -> "ir.Value":
    """All entries of each row [B, N*256, H, D]."""
    return emit.reshape(emit.op("Gather", pool, rows.table, axis=0), [0, -1, heads, size])
