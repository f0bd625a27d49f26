"""Attention written out in standard operators, for layers that TensorRT's fused attention does not compute.

Matmuls run in the model's dtype; scores are float32 from the first matmul to the softmax. The query heads that share a
key/value head are folded into the query axis, so that neither keys nor values are repeated.
"""

from typing import TYPE_CHECKING

from specexport.lowering.trt_step import MaskKind
from specexport.onnx_emit import Emitter

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.lowering.trt_step import AlignedStep, Attention

_HIDDEN = -1.0e30  # weight exactly zero beside any real score, and finite: no inf minus inf


def emit_explicit(
    emit: Emitter, layer: "Attention", step: "AlignedStep", tile: "ir.Value", keys: "ir.Value", values: "ir.Value"
) -> "ir.Value":
    """Attention of a tile of scaled queries [B, W, Hq*D]; returns [B, W, H, G*Dv], with G = Hq/H.

    ``keys`` and ``values`` are the updated caches [B, H, L, D] and [B, H, L, Dv].
    """
    heads, group = layer.kv_heads, layer.num_heads // layer.kv_heads
    split = emit.reshape(tile, [0, 0, heads, group * layer.k_dim])
    by_head = emit.op("Transpose", split, perm=[0, 2, 1, 3])  # [B, H, W, G*D]
    folded = emit.reshape(by_head, [0, 0, -1, layer.k_dim])  # [B, H, W*G, D]
    # Keys on the left: TensorRT would write a transposed copy of the whole cache; queries and scores are small.
    flipped = emit.op("MatMul", keys, emit.op("Transpose", folded, perm=[0, 1, 3, 2]))  # [B, H, L, W*G]
    raw = emit.op("Transpose", flipped, perm=[0, 1, 3, 2])
    weights = _emit_weights(emit, layer, step, raw, int(keys.shape[2]))  # type: ignore[index, arg-type]
    mixed = emit.op("MatMul", weights, values)  # [B, H, W*G, Dv]
    unfolded = emit.reshape(mixed, [0, 0, -1, group * layer.v_dim])  # [B, H, W, G*Dv]
    return emit.op("Transpose", unfolded, perm=[0, 2, 1, 3])


def _emit_weights(emit: Emitter, layer: "Attention", step: "AlignedStep", raw: "ir.Value", capacity: int) -> "ir.Value":
    """Scores [B, H, W*G, L] to weights of the same shape, in the model's dtype."""
    import onnx_ir as ir

    scores = emit.cast(raw, ir.DataType.FLOAT)
    if layer.softcap > 0:
        cap = emit.const(layer.softcap, "float32")
        scores = emit.op("Mul", emit.op("Tanh", emit.op("Div", scores, cap)), cap)
    group = layer.num_heads // layer.kv_heads
    by_slot = emit.reshape(scores, [0, 0, -1, group, capacity])  # [B, H, W, G, L]
    kind = MaskKind(layer.window, causal=layer.causal)
    mask = emit.op("Unsqueeze", step.masks[kind], emit.const([3]))  # [B, 1, W, 1, L]
    seen = emit.op("Where", mask, by_slot, emit.const(_HIDDEN, "float32"))
    sinks = "sinks" in layer.tensors
    weights = _emit_sink_softmax(emit, layer, seen) if sinks else emit.op("Softmax", seen, axis=-1)
    return emit.reshape(emit.cast(weights, layer.dtype), [0, 0, -1, capacity])


def _emit_sink_softmax(emit: Emitter, layer: "Attention", scores: "ir.Value") -> "ir.Value":
    """Softmax with one more score a head, which takes weight and gives nothing."""
    import onnx_ir as ir

    group = layer.num_heads // layer.kv_heads
    sinks = emit.cast(layer.tensors["sinks"], ir.DataType.FLOAT)
    column = emit.reshape(sinks, [1, layer.kv_heads, 1, group, 1])
    axis = emit.const([4])
    top = emit.op("Max", emit.op("ReduceMax", scores, axis, keepdims=1), column)
    powers = emit.op("Exp", emit.op("Sub", scores, top))
    total = emit.op("ReduceSum", powers, axis, keepdims=1)
    return emit.op("Div", powers, emit.op("Add", total, emit.op("Exp", emit.op("Sub", column, top))))
