"""Lowering ``native`` for TensorRT: its own KV-cache update and attention, no plugin.

Each row's new keys and values are written packed, straight to the row's own entries (``TRT_KVCacheUpdate``, form
``packed_nhd``). Attention has no packed form for queries that builds, so the step's tokens are gathered into a tile
[B, Q] with rows RIGHT-aligned: slot Q-1 holds a row's last token. Slot ``j`` of row ``b`` then sees the entries up to
``row_totals[b] - Q + j``, for rows of any length, which is TensorRT's ``lower_right`` causality over the row's length.

A layer takes one of these forms (``choose_form``):

``fused-causal``  ``TRT_Attention`` with ``causal_kind=lower_right`` and the rows' lengths.
``fused-masked``  ``TRT_Attention`` with a Boolean mask (sliding windows), made once a step for each window.
``fused-grouped`` the same with a mask always, and a group's query heads one behind the other as if they were tokens:
                  only in lowering ``native-grouped``.
``explicit``      matmuls, masking and softmax written out (``trt_explicit``): softcap, sinks, and sizes or dtypes for
                  which there is no fused kernel.

``native-grouped`` is for models whose heads share keys (grouped queries). For more than one new token a row, TensorRT
copies a layer's keys and values before its attention reads them, repeated for every query head. Grouped, it copies them
once; but a step of one token, which reads the caches in place otherwise, copies them too.

Fused attention is emitted with ``TRT_decomposable=0``: where TensorRT has no kernel, the build fails and nothing runs
slowly in silence. Slots before a row's first token repeat some token, may see nothing, and nobody reads them.

Cache entries that hold no token must be finite: an arena is zeroed once, and a row in which a sequence became NaN is
cleared before it is used again. TensorRT adds a mask to all scores of the row and reads no lengths beside it (as the
kernels' inputs in a finished engine show), and a weight of zero does not hide a NaN value.
"""

from typing import TYPE_CHECKING, Any

from specexport.lowering.step_inputs import drop_unused_step_inputs
from specexport.lowering.token_ids import add_token_ids
from specexport.lowering.trt_explicit import emit_explicit
from specexport.lowering.trt_layer import Attention
from specexport.lowering.trt_step import AlignedStep, MaskKind, emit_step
from specexport.onnx_emit import Emitter
from specexport.ops.spec import DIM_NAMES, UNPADDED_ATTENTION
from specexport_runtime.abi import OP_DOMAIN, OP_NAME
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

FUSED_CAUSAL, FUSED_MASKED, FUSED_GROUPED, EXPLICIT = "fused-causal", "fused-masked", "fused-grouped", "explicit"

# Found by building one-layer networks with TRT_decomposable=0 in TensorRT-RTX 1.7, decode, verify and prefill profiles,
# float16 and bfloat16, compute capabilities 8.0, 8.6, 8.9, 12.0 and 12.1, causal and masked (7.5: float16 only). The
# answer was the same everywhere: multiples of 8 from 16 to 256; no kernel for float32.
_FUSED_MULTIPLE, _FUSED_SMALLEST, _FUSED_LARGEST = 8, 16, 256
_FUSED_DTYPES = ("FLOAT16", "BFLOAT16")
# Found the same way, head size 64, sm 8.9: one row of one token has no kernel for fewer than 4 query heads; one head
# has none at all; stacked heads (more than one query a head) need two key/value heads.
_FUSED_HEADS, _GROUPED_KV_HEADS = 4, 2
_DTYPES = ("FLOAT16", "BFLOAT16", "FLOAT")


def choose_form(attention: Attention, *, grouped: bool = False) -> str:
    """The form of one layer.

    Args:
        attention: the layer.
        grouped: keys and values are not to be repeated for query heads that share them.
    """
    size = attention.k_dim
    fused_size = size % _FUSED_MULTIPLE == 0 and _FUSED_SMALLEST <= size <= _FUSED_LARGEST
    plain = attention.softcap == 0 and "sinks" not in attention.tensors and attention.dtype.name in _FUSED_DTYPES
    if not (plain and fused_size and size == attention.v_dim and attention.num_heads >= _FUSED_HEADS):
        return EXPLICIT
    if grouped and attention.num_heads > attention.kv_heads >= _GROUPED_KV_HEADS:
        return FUSED_GROUPED
    return FUSED_MASKED if attention.window > 0 else FUSED_CAUSAL


def mask_kind(attention: Attention, form: str) -> MaskKind:
    """The mask that a layer in ``form`` reads."""
    return MaskKind(attention.window, attention.num_heads // attention.kv_heads if form == FUSED_GROUPED else 1)


def lower_trt_native(ir_model: "ir.Model", *, kv_capacity: int, grouped: bool = False) -> tuple[str, ...]:
    """Replace every ``UnpaddedAttention``, fix the cache shapes, add ``token_ids``, drop unread step inputs, in place.

    Args:
        ir_model: the traced model after the passes.
        kv_capacity: L, entries of a cache row.
        grouped: lowering ``native-grouped``.

    Returns:
        Form of each layer.

    Raises:
        UnsupportedModelError: a layer has a dtype, or heads, that no form computes exactly.
    """
    forms = replace_attention(ir_model, kv_capacity=kv_capacity, grouped=grouped)
    add_token_ids(ir_model)
    drop_unused_step_inputs(ir_model)
    return forms


def replace_attention(ir_model: "ir.Model", *, kv_capacity: int, grouped: bool = False) -> tuple[str, ...]:
    """The attention part of ``lower_trt_native``, for graphs without logits; same arguments, result and errors."""
    layers = [read_attention(n, i) for i, n in enumerate(_attention_nodes(ir_model))]
    forms = tuple(choose_form(layer, grouped=grouped) for layer in layers)
    kinds = {mask_kind(layer, form) for layer, form in zip(layers, forms, strict=True) if form != FUSED_CAUSAL}
    step = emit_step(ir_model, sorted(kinds), kv_capacity)
    for i, (layer, form) in enumerate(zip(layers, forms, strict=True)):
        _lower_layer(ir_model, layer, form, step, Emitter(ir_model.graph, f"attention.{i}.{form}"), kv_capacity)
    return forms


def _attention_nodes(ir_model: "ir.Model") -> "list[ir.Node]":
    return [node for node in ir_model.graph if node.op_type == OP_NAME and node.domain == OP_DOMAIN]


def read_attention(node: "ir.Node", index: int) -> Attention:
    """Read one node.

    Args:
        node: an ``UnpaddedAttention``.
        index: its layer, for messages.

    Raises:
        CheckFailedError: its caches have no static head sizes.
        UnsupportedModelError: TensorRT has no exact form for it.
    """
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
    return Attention(node, tensors, heads, kv_heads, k_dim, v_dim, scale, window, softcap, dtype)


def _lower_layer(
    ir_model: "ir.Model", layer: Attention, form: str, step: AlignedStep, emit: Emitter, kv_capacity: int
) -> None:
    caches = []
    for name, size, output in (("k", layer.k_dim, layer.node.outputs[1]), ("v", layer.v_dim, layer.node.outputs[2])):
        cache = layer.tensors[f"{name}_cache"]
        _fix_shape(cache, layer.kv_heads, kv_capacity, size)
        update = emit.reshape(layer.tensors[name], [-1, layer.kv_heads, size])
        options: dict[str, Any] = {"update_form": "packed_nhd", "mode": "linear"}
        updated = emit.op("TRT_KVCacheUpdate", cache, update, step.past, step.cu, **options)
        _take_place(ir_model, output, updated)
        _fix_shape(updated, layer.kv_heads, kv_capacity, size)
        caches.append(updated)
    tile = emit_query_tile(emit, layer, step)
    if form == EXPLICIT:
        slots = emit_explicit(emit, layer, step, tile, *caches)
    elif form == FUSED_GROUPED:
        slots = emit_grouped(emit, layer, step, tile, *caches)
    else:
        slots = emit_fused(emit, layer, step, tile, *caches)
    output = emit.op("Gather", emit.reshape(slots, [-1, layer.num_heads * layer.v_dim]), step.untile, axis=0)
    _take_place(ir_model, layer.node.outputs[0], output)
    emit.place(before=layer.node)
    ir_model.graph.remove(layer.node, safe=True)


def emit_query_tile(emit: Emitter, layer: Attention, step: AlignedStep) -> "ir.Value":
    """Scaled queries as the tile [B, Q, Hq*D], in the model's dtype.

    TensorRT's attention does not scale. The product is taken in float32 and rounded once: a scale such as 96**-0.5
    would itself be rounded in half precision, and twice rounded is worse.
    """
    import onnx_ir as ir

    exact = emit.op("Mul", emit.cast(layer.tensors["q"], ir.DataType.FLOAT), emit.const(layer.scale, "float32"))
    return emit.op("Gather", emit.cast(exact, layer.dtype), step.tile, axis=0)


def emit_fused(
    emit: Emitter, layer: Attention, step: AlignedStep, tile: "ir.Value", keys: "ir.Value", values: "ir.Value"
) -> "ir.Value":
    """``TRT_Attention`` over the tile; returns [B, Q, Hq, D]."""
    heads = emit.reshape(tile, [0, 0, layer.num_heads, layer.k_dim])
    queries = emit.op("Transpose", heads, perm=[0, 2, 1, 3])
    options: dict[str, Any] = {"TRT_decomposable": 0}
    mask = step.masks[mask_kind(layer, FUSED_MASKED)] if layer.window > 0 else None
    if mask is None:
        options["causal_kind"] = "lower_right"
    attended = emit.op("TRT_Attention", queries, keys, values, mask, None, step.totals, **options)
    return emit.op("Transpose", attended, perm=[0, 2, 1, 3])


def emit_grouped(
    emit: Emitter, layer: Attention, step: AlignedStep, tile: "ir.Value", keys: "ir.Value", values: "ir.Value"
) -> "ir.Value":
    """``TRT_Attention`` with as many query heads as keys have: a group's heads are stacked, [B, H, G*Q, D].

    Returns:
        [B, Q, Hq*Dv].
    """
    group = layer.num_heads // layer.kv_heads
    heads = emit.reshape(tile, [0, -1, layer.kv_heads, group, layer.k_dim])  # [B, Q, H, G, D]
    stacked = emit.reshape(emit.op("Transpose", heads, perm=[0, 2, 3, 1, 4]), [0, layer.kv_heads, -1, layer.k_dim])
    mask = step.masks[mask_kind(layer, FUSED_GROUPED)]  # [B, 1, G*Q, L]
    attended = emit.op("TRT_Attention", stacked, keys, values, mask, None, step.totals, TRT_decomposable=0)
    slots = emit.reshape(attended, [0, layer.kv_heads, group, -1, layer.v_dim])
    return emit.reshape(emit.op("Transpose", slots, perm=[0, 3, 1, 2, 4]), [0, -1, layer.num_heads * layer.v_dim])


def _fix_shape(cache: "ir.Value", heads: int, capacity: int, size: int) -> None:
    """Caches are 4-D here: TensorRT updates a network input in place only if nothing reshapes it first."""
    import onnx_ir as ir

    cache.shape = ir.Shape([DIM_NAMES["B"], heads, capacity, size])


def _take_place(ir_model: "ir.Model", old: "ir.Value", new: "ir.Value") -> None:
    """Readers of ``old``, and the graph output that it is, now get ``new``, under its name if it is an output."""
    import onnx_ir as ir

    outputs = ir_model.graph.outputs
    if old in outputs:
        outputs[outputs.index(old)] = new
        new.name, old.name = old.name, None
    new.type = old.type if old.type is not None else new.type
    new.shape = old.shape
    ir.convenience.replace_all_uses_with(old, new)
