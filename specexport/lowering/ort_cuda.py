"""Lowering for ONNX Runtime on an NVIDIA GPU: ``com.microsoft.PagedAttention`` on packed tokens.

The kernel takes what an unpadded step is: packed queries, cumulative new-token counts, the entries that each row holds,
and a table of cache blocks. Nothing is padded and no row waits for another. So the graph has, beside the contract's
step inputs, two more: ``block_table`` and ``attention_metadata`` (see ``specexport_runtime.executors.paged``;
the executor fills them), and its caches are a pool of blocks, ``[kv_blocks, 256, H, D]``, under the contract's names.
A block holds 256 entries: the fused kernel wants a multiple of 256 for head sizes up to 64, of 128 up to 128 and of 64
above, and the operator a power of two.

The kernel knows one head size, a multiple of 8, for keys and values. Others take zeros at the end of each head, which
changes no dot product, and lose them again after the kernel.

Source: the operator's schema in onnxruntime 1.31 (docs/ContribOperators.md, docs/contrib_ops/cuda/paged_attention.md).
"""

from typing import TYPE_CHECKING

import numpy as np

from specexport.lowering.common import (
    drop_unused_step_inputs,
    norm_type_pass,
    refuse_slopes,
    require_causal,
    widen_top_k,
)
from specexport.lowering.fuse import remove_dead_nodes
from specexport.lowering.paged_tokens import build_paged_tokens, can_rotate_heads
from specexport.onnx_emit import Emitter, add_input, constant
from specexport.ops.spec import UNPADDED_ATTENTION
from specexport.passes.base import CountingPass, Rewrite, attention_nodes
from specexport_runtime.abi import CU_NEW_TOKENS, KV_LENS, LOGITS, TOKEN_IDS, LayerGeometry
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError
from specexport_runtime.executors.paged import (
    ATTENTION_METADATA,
    BLOCK_ENTRIES,
    BLOCK_TABLE,
    MAX_HEAD_SIZE,
    paged_head_size,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.lowering.fuse_region import Rotation

_CONTRIB = "com.microsoft"
_CACHE_RANK = 5
# Inputs of PagedAttention by number: key_cache and value_cache stay where the tuple below puts them.
_SINK_INPUT, _METADATA_INPUT = 11, 16


def operator_passes() -> list[CountingPass]:
    """The passes after which a session can run a graph in 16 bits, and record it."""
    return [
        Rewrite("attention-lower", "a kernel over packed tokens and paged caches; adds token_ids", _lower_attention),
        norm_type_pass(),
        Rewrite("top-k-widen", "opset 24 has no TopK of bfloat16", widen_top_k),
        Rewrite(
            "split-slice",
            "the kernel of uneven splits reads host memory, which no recording holds",
            replace_uneven_splits,
        ),
    ]


def _lower_attention(ir_model: "ir.Model") -> int:
    for node in attention_nodes(ir_model):
        _refuse_dtype(node)
    return attach_paged_attention(ir_model)


def can_fuse_rotation(node: "ir.Node", rotation: "Rotation") -> bool:
    """Whether the kernel of an attention node takes a rotation."""
    return can_rotate_heads(paged_head_size(_read_geometry(node)), rotation.cos.shape[1])


def attach_paged_attention(ir_model: "ir.Model") -> int:
    """``PagedAttention`` for each attention, and ``token_ids``, for any float dtype: float32 has no kernel."""
    nodes = list(attention_nodes(ir_model))
    geometries = [_read_geometry(node) for node in nodes]
    for node in nodes:
        require_causal(node, "ONNX Runtime's paged attention")
    shared = _step_inputs(ir_model) if nodes else {}
    for node, geometry in zip(nodes, geometries, strict=True):
        _page_caches(node, geometry)
        _replace(ir_model, node, geometry, shared)
    _add_token_ids(ir_model)
    ir_model.opset_imports.setdefault(_CONTRIB, 1)
    remove_dead_nodes(ir_model)  # what a packed tensor was split by, and norms and angles that the kernel has now
    drop_unused_step_inputs(ir_model)
    return len(nodes)


def replace_uneven_splits(ir_model: "ir.Model") -> int:
    """Slices in the place of each Split that a CUDA graph cannot hold, in place; returns how many there were.

    The CUDA kernel takes equal parts, and three parts of the last axis, from its arguments. For others it copies their
    sizes from host memory that it gives back, and a replay would read that again.
    """
    nodes = [node for node in ir_model.graph if node.op_type == "Split" and node.domain == ""]
    uneven = 0
    for node in nodes:
        source, sizes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        if source is None or source.shape is None or sizes is None or sizes.const_value is None:
            continue
        parts, axis = sizes.const_value.numpy(), node.attributes.get_int("axis", 0) % len(source.shape)
        if len(set(parts.tolist())) == 1 or (len(parts) == 3 and axis == len(source.shape) - 1):
            continue
        emit, ends = Emitter(ir_model.graph), np.cumsum(parts).tolist()
        cut = [
            emit.op("Slice", source, emit.const([end - size]), emit.const([end]), emit.const([axis]))
            for size, end in zip(parts.tolist(), ends, strict=True)
        ]
        emit.replace(node, cut)
        uneven += 1
    return uneven


def _named_inputs(node: "ir.Node") -> dict[str, "ir.Value | None"]:
    return dict(zip([item.name for item in UNPADDED_ATTENTION.inputs], node.inputs, strict=False))


def _refuse_dtype(node: "ir.Node") -> None:
    import onnx_ir as ir

    refuse_slopes(node, "ONNX Runtime's paged attention")
    cache = _named_inputs(node)["k_cache"]
    dtype = None if cache is None else cache.dtype
    if dtype not in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        raise UnsupportedModelError(
            f"{node.name}: ONNX Runtime's paged attention takes float16 and bfloat16, not {dtype}.",
            "build with `dtype: float16`, or for backend ort-cpu.",
        )


def _read_geometry(node: "ir.Node") -> LayerGeometry:
    """Cache sizes of a layer, checked against the kernel's limits."""
    given = _named_inputs(node)
    sizes = []
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        size = None if cache is None or cache.shape is None or len(cache.shape) != _CACHE_RANK else cache.shape[4]
        if not isinstance(size, int):
            raise CheckFailedError(f"{node.name}: the caches have no static head size.")
        sizes.append(size)
    geometry = LayerGeometry(node.attributes["kv_num_heads"].as_int(), *sizes)
    if paged_head_size(geometry) > MAX_HEAD_SIZE:
        raise UnsupportedModelError(
            f"{node.name}: ONNX Runtime's paged attention takes heads of up to {MAX_HEAD_SIZE}, not {max(sizes)}.",
            "build for backend ort-cpu.",
        )
    return geometry


def _step_inputs(ir_model: "ir.Model") -> dict[str, "ir.Value"]:
    """Step inputs by name; adds the two of this backend, and ``past_seqlens`` [B] from ``kv_lens`` [B, 1]."""
    import onnx_ir as ir

    graph = ir_model.graph
    shapes: dict[str, list[int | str]] = {
        BLOCK_TABLE.name: ["num_seqs", "blocks_per_row"],
        ATTENTION_METADATA.name: [3],
    }
    for name, shape in shapes.items():
        add_input(graph, name, ir.DataType.INT32, shape)
    by_name = {str(value.name): value for value in graph.inputs}
    emit = Emitter(graph)
    axis = constant(graph, "paged.row_axis", np.array([1], np.int64))
    past = emit.op("Squeeze", by_name[KV_LENS.name], axis, shape=["num_seqs"])
    past.name = "past_seqlens"
    emit.place(before=graph[0])
    return by_name | {"past_seqlens": past}


def _page_caches(node: "ir.Node", geometry: LayerGeometry) -> None:
    """Give a layer's caches, in and out, the shape of a pool of blocks."""
    import onnx_ir as ir

    shape: list[int | str] = ["kv_blocks", BLOCK_ENTRIES, geometry.kv_heads, paged_head_size(geometry)]
    for value in (*node.inputs[3:5], *node.outputs[1:3]):
        if value is not None:
            value.shape = ir.Shape(shape)


def _replace(ir_model: "ir.Model", node: "ir.Node", geometry: LayerGeometry, shared: dict[str, "ir.Value"]) -> None:
    given, size = _named_inputs(node), paged_head_size(geometry)
    num_heads, scale, window, softcap = (node.attributes[key] for key in ("num_heads", "scale", "window", "softcap"))
    emit = Emitter(ir_model.graph)
    heads = (num_heads.as_int(), geometry.kv_heads, geometry.kv_heads)
    fused = build_paged_tokens(emit, node, geometry)
    tokens = [
        _pad_heads(emit, value, count, given_size, size)
        for value, count, given_size in zip(
            fused.tokens, heads, (geometry.k_dim, geometry.k_dim, geometry.v_dim), strict=True
        )
    ]
    inputs: list[ir.Value | None] = [None] * (_METADATA_INPUT + 1)
    paging = [shared[name] for name in (CU_NEW_TOKENS.name, "past_seqlens", BLOCK_TABLE.name)]
    inputs[: len(tokens) + 2 + len(paging)] = [*tokens, given["k_cache"], given["v_cache"], *paging]
    inputs[_SINK_INPUT] = given.get("sinks")
    for index, value in fused.inputs.items():
        inputs[index] = value
    inputs[_METADATA_INPUT] = shared[ATTENTION_METADATA.name]
    attributes = {
        "num_heads": heads[0],
        "kv_num_heads": geometry.kv_heads,
        "scale": scale.as_float(),
        "softcap": softcap.as_float(),
        # Both count the token itself: a window of w is the token and the w-1 before it.
        "local_window_size": window.as_int() if window.as_int() > 0 else -1,
        **fused.attributes,
    }
    paged = emit.node("PagedAttention", inputs, attributes, outputs=3, domain=_CONTRIB, name=node.name)
    output = _unpad_heads(emit, paged.outputs[0], heads[0], geometry.v_dim, size)
    emit.replace(node, [output, *paged.outputs[1:]])


def _pad_heads(emit: Emitter, tokens: "ir.Value | None", heads: int, given: int, size: int) -> "ir.Value | None":
    """[T, heads*given] to [T, heads*size], zeros after each head: a product, as Pad has no bfloat16 kernel."""
    if given == size or tokens is None or tokens.dtype is None:
        return tokens
    eye = np.eye(given, size).astype(tokens.dtype.numpy())
    split = constant(emit.graph, f"paged.split.{heads}x{given}", np.array([-1, heads, given], np.int64))
    join = constant(emit.graph, f"paged.join.{heads * size}", np.array([-1, heads * size], np.int64))
    wide = constant(emit.graph, f"paged.widen.{given}x{size}", eye)
    return emit.op("Reshape", emit.op("MatMul", emit.op("Reshape", tokens, split), wide), join)


def _unpad_heads(emit: Emitter, tokens: "ir.Value", heads: int, wanted: int, size: int) -> "ir.Value":
    """[T, heads*size] to [T, heads*wanted], without the zeros."""
    if wanted == size:
        return tokens
    split = constant(emit.graph, f"paged.split.{heads}x{size}", np.array([-1, heads, size], np.int64))
    join = constant(emit.graph, f"paged.join.{heads * wanted}", np.array([-1, heads * wanted], np.int64))
    start, end, axis = (constant(emit.graph, f"paged.at.{at}", np.array([at], np.int64)) for at in (0, wanted, 2))
    cut = emit.op("Slice", emit.op("Reshape", tokens, split), start, end, axis)
    return emit.op("Reshape", cut, join)


def _add_token_ids(ir_model: "ir.Model") -> None:
    """Output ``token_ids`` [R]: the greedy token of each row of logits, -1 for a row with a NaN."""
    import onnx_ir as ir

    logits = next(value for value in ir_model.graph.outputs if value.name == LOGITS.name)
    emit = Emitter(ir_model.graph)
    best = emit.op("ArgMax", logits, axis=-1, keepdims=0)
    last = constant(emit.graph, "token_ids.axis", np.array([-1], np.int64))
    broken = emit.op("IsNaN", emit.op("ReduceSum", logits, last, keepdims=0))
    none = constant(emit.graph, "token_ids.none", np.array(-1, np.int64))
    token_ids = emit.op("Where", broken, none, best)
    token_ids.name = TOKEN_IDS.name
    token_ids.shape = None if logits.shape is None else ir.Shape([logits.shape[0]])
    emit.place()
    ir_model.graph.outputs.append(token_ids)
