"""What ``PagedAttention`` does to queries and keys before it attends: q, k and v as one, norms of heads, rotation.

Rotary embeddings are found by ``fuse``, which marks the node. The kernel rotates token j of a row at ``past_seqlens`` +
j, so a row for each token (``specexport_runtime.executors.paged``) is rotated as before. Before that it normalizes
heads: sums in float32, weights in the model's type, the result rounded to it, as the norm in the graph does.

Source: the operator's schema and CUDA kernels in onnxruntime 1.31 (paged_attention.cc, paged_attention_impl.cu).
"""

from typing import TYPE_CHECKING, NamedTuple

from specexport.lowering.fuse import ROTARY_INPUTS, find_packed_qkv, rotary_kind, skip_reshapes
from specexport.onnx_emit import Emitter
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.executors.paged import paged_head_size

if TYPE_CHECKING:
    import onnx_ir as ir

_HEAD_MULTIPLE, _TABLE_MULTIPLE = 16, 8
_NORM_INPUTS = (12, 13)
_TABLE_INPUTS = (8, 9)


class PagedTokens(NamedTuple):
    """What a node gets for its tokens."""

    tokens: "list[ir.Value | None]"  # q, k and v [T, heads*D]; or all in one and two of None
    inputs: "dict[int, ir.Value]"  # tables and weights of norms by the number of the operator's input
    attributes: dict[str, float]


class _Norm(NamedTuple):
    source: "ir.Value"
    weight: "ir.Value"
    epsilon: float


def can_rotate_heads(size: int, table_width: int) -> bool:
    """Whether the kernel rotates the first ``2 * table_width`` of ``size`` channels a head."""
    return size % _HEAD_MULTIPLE == 0 and table_width % _TABLE_MULTIPLE == 0 and 2 * table_width <= size


def build_paged_tokens(emit: Emitter, node: "ir.Node", geometry: LayerGeometry) -> PagedTokens:
    """Tokens of an ``UnpaddedAttention`` node, with all that the kernel does to them left to it."""
    tokens: list[ir.Value | None] = list(node.inputs[:3])
    inputs: dict[int, ir.Value] = {}
    attributes: dict[str, float] = {}
    rotary = rotary_kind(node)
    if rotary:
        tables = [node.inputs[index] for index in ROTARY_INPUTS]
        inputs = {index: value for index, value in zip(_TABLE_INPUTS, tables, strict=True) if value is not None}
        attributes = {"do_rotary": 1, "rotary_interleaved": int(rotary == "interleaved")}
    size, heads = paged_head_size(geometry), (node.attributes["num_heads"].as_int(), geometry.kv_heads)
    if geometry.k_dim != size or geometry.v_dim != size:
        return PagedTokens(tokens, inputs, attributes)  # heads are filled up, each for itself
    norms = [_find_norm(value, size) for value in tokens[:2]]
    if norms[0] is not None and norms[1] is not None and norms[0].epsilon == norms[1].epsilon:
        tokens[:2] = [norm.source for norm in norms if norm is not None]
        inputs |= {index: norm.weight for index, norm in zip(_NORM_INPUTS, norms, strict=True) if norm is not None}
        attributes["qk_norm_epsilon"] = norms[0].epsilon
    packed, width = find_packed_qkv(tokens), (heads[0] + 2 * heads[1]) * size
    if packed is not None and packed.shape is not None and packed.shape[2] == width:
        return PagedTokens([emit.reshape(packed, [-1, width]), None, None], inputs, attributes)
    for index, count in enumerate(heads):
        value = tokens[index]
        if value is not None and value is not node.inputs[index]:
            tokens[index] = emit.reshape(value, [-1, count * size])
    return PagedTokens(tokens, inputs, attributes)


def _find_norm(value: "ir.Value | None", size: int) -> _Norm | None:
    """The norm of each head that gives ``value``, where the kernel's is the same; None for any other."""
    value = skip_reshapes(value)
    node = None if value is None else value.producer()
    if node is None or node.op_type != "RMSNormalization" or node.attributes.get_int("stash_type", 1) != 1:
        return None
    source, weight = node.inputs
    if source is None or source.shape is None or weight is None or weight.const_value is None:
        return None
    axis, rank = node.attributes.get_int("axis", -1), len(source.shape)
    by_head = axis in (-1, rank - 1) and source.shape[rank - 1] == size and list(weight.shape or ()) == [size]
    same_type = source.dtype == weight.dtype == (None if value is None else value.dtype)
    return _Norm(source, weight, node.attributes.get_float("epsilon", 1e-5)) if by_head and same_type else None
