"""What a TensorRT graph needs of the step, computed once for all layers, and of each attention layer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport.onnx_emit import Emitter, add_input
from specexport.ops.spec import DIM_NAMES
from specexport_runtime.abi import CU_NEW_TOKENS, KV_LENS, ROW_TOTALS, TILE_INDEX, UNTILE_INDEX, TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir


class MaskKind(NamedTuple):
    """A mask that layers share."""

    window: int  # positions a token sees, its own included; -1 for all
    heads: int = 0  # query heads that are folded, see ``trt_native``; 0 for a mask that all heads share
    # a token sees nothing after itself; False: all of its row (the window bounds what lies before it)
    causal: bool = True


class AlignedStep(NamedTuple):
    """What every layer needs of the step, computed once at the top of the graph."""

    past: "ir.Value"  # ``kv_lens`` as int32 [B]
    totals: "ir.Value"  # ``row_totals`` as int32 [B]; in graphs whose tokens see later ones, dummies do not count
    cu: "ir.Value"  # ``cu_new_tokens``, int32 [B+1]
    tile: "ir.Value"  # ``tile_index`` [B, W]
    untile: "ir.Value"  # ``untile_index`` [T]
    fold: int  # F, slots of a row that are folded; W is a multiple of it
    # bool, what each slot sees, for kinds that layers need: [B, 1, W, L], folded heads [B, Hq*F, W/F, L]
    masks: "dict[MaskKind, ir.Value]"


def emit_step(ir_model: "ir.Model", kinds: Sequence[MaskKind], kv_capacity: int, fold: int) -> AlignedStep:
    """Add the tile's inputs to the graph, and at its top what depends on the step alone, with masks of ``kinds``."""
    by_name = {value.name: value for value in ir_model.graph.inputs}
    tile, untile = (add_step_input(ir_model, spec) for spec in (TILE_INDEX, UNTILE_INDEX))
    emit = Emitter(ir_model.graph, "step")
    past, totals = (emit.reshape(by_name[spec.name], [-1]) for spec in (KV_LENS, ROW_TOTALS))
    masks = emit_masks(emit, by_name, tile, kinds, kv_capacity, fold)
    emit.place(before=ir_model.graph[0])
    return AlignedStep(past, totals, by_name[CU_NEW_TOKENS.name], tile, untile, fold, masks)


def add_step_input(ir_model: "ir.Model", spec: TensorSpec) -> "ir.Value":
    """A new input of the graph, in front of the caches."""
    import onnx_ir as ir

    shape = [DIM_NAMES.get(word, word) if isinstance(word, str) else word for word in spec.shape]
    dtype = ir.DataType.from_numpy(np.dtype(spec.dtype))
    first_cache = next(i for i, value in enumerate(ir_model.graph.inputs) if "cache" in str(value.name))
    return add_input(ir_model.graph, spec.name, dtype, shape, first_cache)


def emit_masks(
    emit: Emitter,
    inputs: "dict[str | None, ir.Value]",
    tile: "ir.Value",
    kinds: Sequence[MaskKind],
    kv_capacity: int,
    fold: int,
) -> "dict[MaskKind, ir.Value]":
    """[B, 1, W, L] or [B, Hq*F, W/F, L] for each kind.

    Token ``t`` of row ``b`` lies in entry ``kv_lens[b] + t - cu_new_tokens[b]``. That needs no size of the step, which
    TensorRT would copy from the host. A slot that holds no token of its row is clamped into the row: it sees something.
    Where tokens see later ones, the row's length alone says how far.
    """
    import onnx_ir as ir

    if not kinds:
        return {}
    one = emit.const([1], "int32")
    firsts = emit.op("Slice", inputs[CU_NEW_TOKENS.name], emit.const([0]), emit.const([-1]))
    offsets = emit.op("Sub", inputs[KV_LENS.name], emit.op("Unsqueeze", firsts, emit.const([1])))  # [B, 1]
    entry_of = emit.op("Add", emit.cast(tile, ir.DataType.INT32), offsets)  # [B, W]
    ends = emit.op("Sub", inputs[ROW_TOTALS.name], one)
    inside_row = emit.op("Min", entry_of, ends)
    limit = emit.op("Max", inside_row, emit.const(0, "int32"))  # [B, W]
    entries = emit.const(np.arange(kv_capacity).reshape(1, 1, 1, -1), "int32")
    masks = {}
    for heads in sorted({kind.heads for kind in kinds}):
        if heads:
            by_token = emit.op("Transpose", emit.reshape(limit, [0, -1, fold]), perm=[0, 2, 1])  # [B, F, W/F]
            by_head = emit.op("Tile", by_token, emit.const([1, heads, 1]))  # a head's tokens one after the other
            seen_to = emit.op("Unsqueeze", by_head, emit.const([3]))
        else:
            seen_to = emit.op("Unsqueeze", limit, emit.const([1, 3]))
        for causal in sorted({kind.causal for kind in kinds if kind.heads == heads}):
            # No slot sees beyond its row's end: the larger of both is that end, for every slot.
            last = seen_to if causal else emit.op("Max", seen_to, emit.op("Unsqueeze", ends, emit.const([2, 3])))
            seen = emit.op("LessOrEqual", entries, last)
            for window in sorted({kind.window for kind in kinds if (kind.heads, kind.causal) == (heads, causal)}):
                mask = seen
                if window > 0:
                    before = emit.op("Sub", seen_to, emit.const(window, "int32"))
                    mask = emit.op("And", seen, emit.op("Greater", entries, before))
                masks[MaskKind(window, heads, causal)] = mask
    return masks


class Attention(NamedTuple):
    """One ``UnpaddedAttention`` node, read."""

    node: "ir.Node"
    tensors: "dict[str, ir.Value]"  # inputs by name
    num_heads: int
    kv_heads: int
    k_dim: int  # size of a key head
    v_dim: int  # size of a value head
    scale: float  # factor on the scores
    window: int  # entries a token sees, its own included; -1 for all
    softcap: float  # 0 for off
    dtype: "ir.DataType"  # of caches and activations
    causal: bool = True  # tokens see nothing after themselves
