"""TensorRT's own KV-cache update and attention, no plugin.

Each row's new keys and values are written packed, straight to the row's own entries (``TRT_KVCacheUpdate``, form
``packed_nhd``). Attention has no packed form for queries that builds, so the step's tokens are gathered into a tile [B,
W] with rows RIGHT-aligned: slot W-1 holds a row's last token. Slot ``j`` of row ``b`` then sees the entries up to
``row_totals[b] - W + j``, for rows of any length, which is TensorRT's ``lower_right`` causality over the row's length.

A layer takes one of these forms (``choose_form``):

``folded``        ``TRT_Attention`` over queries [B, Hq*F, W/F, D] with a Boolean mask: each head stands F times, for F
                  tokens of a row. F is what a row has in a verify step, K+1, so that a head has one query to decode or
                  verify, and TensorRT then reads the caches in place.
``fused-causal``  ``TRT_Attention`` with ``causal_kind=lower_right`` and the rows' lengths.
``fused-masked``  ``TRT_Attention`` with a Boolean mask, made once a step for each window: sliding windows, and all
                  layers of a graph in which tokens of some layer see later ones. There a row's length must be its own,
                  without the dummies of a fixed profile, which causality over lengths would need.
``explicit``      matmuls, masking and softmax written out: softcap, sinks, and sizes or dtypes for
                  which there is no fused kernel.

The fused forms are for what is not folded: where the masks would be too large (``count_mask_heads``), or F is 1.

There TensorRT copies a layer's keys and values before its attention reads them, repeated for every query
head, where a row has more than one query. Folded, nothing is copied to decode or verify, nor for a prefill from compute
capability 8.9 on (8.0 copies). Two things are given for that. Each head needs a separate mask, which grows with the
tokens of a prefill (``count_mask_heads``). And the queries are outputs of the graph, all in one memory: TensorRT copies the
caches for the sake of a layout that it chooses for the queries, and cannot choose where others see them.

Fused attention is emitted with ``TRT_decomposable=0``: where TensorRT has no kernel, the build fails and nothing runs
slowly in silence. Slots before a row's first token repeat some token, may see nothing, and are not read.

Cache entries that hold no token must be finite: an arena is zeroed once, and a row in which a sequence became NaN is
cleared before it is used again. TensorRT adds a mask to all scores of the row and reads no lengths beside it (as the
kernels' inputs in a finished engine show), and a weight of zero does not hide a NaN value.

Written out, matmuls run in the model's dtype; scores are float32 from the first matmul to the softmax. The query heads
that share a key/value head are folded into the query axis, so that neither keys nor values are repeated.
"""

from typing import TYPE_CHECKING, Any

from specexport.lowering.common import add_token_ids, drop_unused_step_inputs, is_causal, refuse_slopes, replace_value
from specexport.lowering.trt_step import AlignedStep, Attention, MaskKind, emit_step
from specexport.onnx_emit import Emitter
from specexport.ops.spec import DIM_NAMES, UNPADDED_ATTENTION
from specexport.passes.base import attention_nodes
from specexport_runtime.abi import QUERY
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

FOLDED, FUSED_CAUSAL, FUSED_MASKED, EXPLICIT = "folded", "fused-causal", "fused-masked", "explicit"

# Found by building one-layer networks with TRT_decomposable=0 in TensorRT-RTX 1.7, decode, verify and prefill profiles,
# float16 and bfloat16, compute capabilities 8.0, 8.6, 8.9, 12.0 and 12.1, causal and masked (7.5: float16 only). The
# answer was the same everywhere: multiples of 8 from 16 to 256; no kernel for float32.
_FUSED_MULTIPLE, _FUSED_SMALLEST, _FUSED_LARGEST = 8, 16, 256
_FUSED_DTYPES = ("FLOAT16", "BFLOAT16")
# Found the same way, head size 64, sm 8.9: one row of one token has no kernel for fewer than 4 query heads; one head
# has none at all. Folded tokens count as heads.
_FUSED_HEADS = 4
_DTYPES = ("FLOAT16", "BFLOAT16", "FLOAT")

_HIDDEN = -1.0e30  # weight exactly zero beside any real score, and finite: no inf minus inf


def choose_form(attention: Attention, *, fold: int = 1, sees_ahead: bool = False) -> str:
    """The form of one layer; ``fold`` is F, ``sees_ahead`` says that tokens of some layer see later ones."""
    size = attention.k_dim
    fused_size = size % _FUSED_MULTIPLE == 0 and _FUSED_SMALLEST <= size <= _FUSED_LARGEST
    plain = attention.softcap == 0 and "sinks" not in attention.tensors and attention.dtype.name in _FUSED_DTYPES
    if not (plain and fused_size and size == attention.v_dim and attention.num_heads * fold >= _FUSED_HEADS):
        return EXPLICIT
    if fold > 1:
        return FOLDED
    return FUSED_MASKED if attention.window > 0 or sees_ahead else FUSED_CAUSAL


def mask_kind(attention: Attention, form: str) -> MaskKind:
    """The mask that a layer in ``form`` reads."""
    return MaskKind(attention.window, attention.num_heads if form == FOLDED else 0, attention.causal)


def lower_trt_native(ir_model: "ir.Model", *, kv_capacity: int, fold: int = 1) -> tuple[str, ...]:
    """Replace each ``UnpaddedAttention``, fix cache shapes, add ``token_ids``, in place; each layer's form."""
    forms = replace_attention(ir_model, kv_capacity=kv_capacity, fold=fold)
    add_token_ids(ir_model)
    drop_unused_step_inputs(ir_model)
    return forms


def replace_attention(ir_model: "ir.Model", *, kv_capacity: int, fold: int = 1) -> tuple[str, ...]:
    """The attention part of ``lower_trt_native``, for graphs without logits; same arguments, result and errors."""
    layers = [read_attention(n, i) for i, n in enumerate(attention_nodes(ir_model))]
    if not layers:  # heads over one feature
        return ()
    ahead = not all(layer.causal for layer in layers)
    forms = tuple(choose_form(layer, fold=fold, sees_ahead=ahead) for layer in layers)
    kinds = {mask_kind(layer, form) for layer, form in zip(layers, forms, strict=True) if form != FUSED_CAUSAL}
    step = emit_step(ir_model, sorted(kinds), kv_capacity, fold)
    for i, (layer, form) in enumerate(zip(layers, forms, strict=True)):
        emit = Emitter(ir_model.graph, f"attention.{i}.{form}")
        queries = _lower_layer(ir_model, layer, form, step, emit, kv_capacity)
        if form == FOLDED:
            # An output only so that TensorRT does not take its layout apart: it would copy the caches to fit it.
            queries.name = QUERY.name.format(i=i)
            ir_model.graph.outputs.append(queries)
    return forms


def count_mask_heads(ir_model: "ir.Model", *, fold: int) -> int:
    """Query heads of all masks, were the layers folded: a mask has a byte for each head, row, slot and cache entry."""
    layers = [read_attention(node, i) for i, node in enumerate(attention_nodes(ir_model))]
    kinds = {mask_kind(layer, FOLDED) for layer in layers if choose_form(layer, fold=fold) == FOLDED}
    return sum(kind.heads for kind in kinds)


def read_attention(node: "ir.Node", index: int) -> Attention:
    """Read one ``UnpaddedAttention`` of layer ``index``; UnsupportedModelError if TensorRT has no exact form for it."""
    refuse_slopes(node, "TensorRT")
    named = zip([item.name for item in UNPADDED_ATTENTION.inputs], node.inputs, strict=False)
    tensors = {name: value for name, value in named if value is not None}
    sizes = [None if tensors[n].shape is None else tensors[n].shape[a] for n, a in (("k_cache", 4), ("v_cache", 4))]  # type: ignore[index]
    k_dim, v_dim = sizes
    if not isinstance(k_dim, int) or not isinstance(v_dim, int):
        raise CheckFailedError(f"{node.name}: the caches have no static head size.")
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
    dtype = tensors["k_cache"].dtype
    if dtype is None or dtype.name not in _DTYPES:
        raise UnsupportedModelError(
            f"attention layer {index} is {dtype}; TensorRT computes float16, bfloat16, float32."
        )
    if heads % kv_heads:
        raise UnsupportedModelError(f"attention layer {index} has {heads} query heads on {kv_heads} key/value heads.")
    window = node.attributes["window"].as_int()
    return Attention(node, tensors, heads, kv_heads, k_dim, v_dim, scale, window, softcap, dtype, is_causal(node))


def _lower_layer(
    ir_model: "ir.Model", layer: Attention, form: str, step: AlignedStep, emit: Emitter, kv_capacity: int
) -> "ir.Value":
    """Put the layer's new nodes in the place of its node; returns the queries that its attention reads."""
    caches = []
    for name, size, output in (("k", layer.k_dim, layer.node.outputs[1]), ("v", layer.v_dim, layer.node.outputs[2])):
        cache = layer.tensors[f"{name}_cache"]
        _fix_shape(cache, layer.kv_heads, kv_capacity, size)
        update = emit.reshape(layer.tensors[name], [-1, layer.kv_heads, size])
        options: dict[str, Any] = {"update_form": "packed_nhd", "mode": "linear"}
        updated = emit.op("TRT_KVCacheUpdate", cache, update, step.past, step.cu, **options)
        _replace(ir_model, output, updated)
        _fix_shape(updated, layer.kv_heads, kv_capacity, size)
        caches.append(updated)
    queries = emit_query_tile(emit, layer, step)
    if form == EXPLICIT:
        slots = emit_explicit(emit, layer, step, queries, *caches)
    elif form == FOLDED:
        queries = emit_folded_queries(emit, layer, step, queries)
        slots = emit_folded(emit, layer, step, queries, *caches)
    else:
        slots = emit_fused(emit, layer, form, step, queries, *caches)
    output = emit.op("Gather", emit.reshape(slots, [-1, layer.num_heads * layer.v_dim]), step.untile, axis=0)
    _replace(ir_model, layer.node.outputs[0], output)
    emit.place(before=layer.node)
    ir_model.graph.remove(layer.node, safe=True)
    return queries


def emit_query_tile(emit: Emitter, layer: Attention, step: AlignedStep) -> "ir.Value":
    """Scaled queries as the tile [B, W, Hq*D], in the model's dtype; scaled in float32, to round them once."""
    import onnx_ir as ir

    exact = emit.op("Mul", emit.cast(layer.tensors["q"], ir.DataType.FLOAT), emit.const(layer.scale, "float32"))
    return emit.op("Gather", emit.cast(exact, layer.dtype), step.tile, axis=0)


def emit_fused(
    emit: Emitter,
    layer: Attention,
    form: str,
    step: AlignedStep,
    tile: "ir.Value",
    keys: "ir.Value",
    values: "ir.Value",
) -> "ir.Value":
    """``TRT_Attention`` over the tile; returns [B, W, Hq, D]."""
    heads = emit.reshape(tile, [0, 0, layer.num_heads, layer.k_dim])
    queries = emit.op("Transpose", heads, perm=[0, 2, 1, 3])
    options: dict[str, Any] = {"TRT_decomposable": 0}
    mask = step.masks[mask_kind(layer, form)] if form == FUSED_MASKED else None
    if mask is None:
        options["causal_kind"] = "lower_right"
    attended = emit.op("TRT_Attention", queries, keys, values, mask, None, step.totals, **options)
    return emit.op("Transpose", attended, perm=[0, 2, 1, 3])


def emit_folded_queries(emit: Emitter, layer: Attention, step: AlignedStep, tile: "ir.Value") -> "ir.Value":
    """The tile with tokens as heads [B, Hq*F, W/F, D]: slot ``s*F + f`` is query ``s`` of the heads ``h*F + f``."""
    import onnx_ir as ir

    heads = layer.num_heads
    slots = emit.reshape(tile, [0, -1, step.fold, heads, layer.k_dim])  # [B, W/F, F, Hq, D]
    by_head = emit.op("Transpose", slots, perm=[0, 1, 3, 2, 4])
    folded = emit.reshape(by_head, [0, 0, heads * step.fold, layer.k_dim])
    queries = emit.op("Transpose", folded, perm=[0, 2, 1, 3], dtype=layer.dtype)
    queries.shape = ir.Shape([DIM_NAMES["B"], heads * step.fold, "num_queries", layer.k_dim])
    return queries


def emit_folded(
    emit: Emitter, layer: Attention, step: AlignedStep, queries: "ir.Value", keys: "ir.Value", values: "ir.Value"
) -> "ir.Value":
    """``TRT_Attention`` of folded queries; returns [B, W, Hq*Dv]."""
    mask = step.masks[mask_kind(layer, FOLDED)]
    attended = emit.op("TRT_Attention", queries, keys, values, mask, TRT_decomposable=0)
    by_query = emit.op("Transpose", attended, perm=[0, 2, 1, 3])
    split = emit.reshape(by_query, [0, 0, layer.num_heads, step.fold, layer.v_dim])
    return emit.reshape(emit.op("Transpose", split, perm=[0, 1, 3, 2, 4]), [0, -1, layer.num_heads * layer.v_dim])


def _fix_shape(cache: "ir.Value", heads: int, capacity: int, size: int) -> None:
    """Caches are 4-D here: TensorRT updates a network input in place only if nothing reshapes it first."""
    import onnx_ir as ir

    cache.shape = ir.Shape([DIM_NAMES["B"], heads, capacity, size])


def _replace(ir_model: "ir.Model", old: "ir.Value", new: "ir.Value") -> None:
    new.type = old.type if old.type is not None else new.type
    new.shape = old.shape
    replace_value(ir_model, old, new)


def emit_explicit(
    emit: Emitter, layer: "Attention", step: "AlignedStep", tile: "ir.Value", keys: "ir.Value", values: "ir.Value"
) -> "ir.Value":
    """Attention [B, W, H, G*Dv] (G = Hq/H) of a tile of scaled queries [B, W, Hq*D] over updated caches."""
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
