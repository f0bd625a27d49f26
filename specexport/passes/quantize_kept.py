"""Linear layers and embeddings with the integers of a quantized checkpoint."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, lazy_weight
from specexport.passes.base import CountingPass
from specexport.passes.block_weight import BlockWeight, join
from specexport.passes.linear_pack import PARTS
from specexport.passes.lm_head_cut import CUT
from specexport.passes.quantize_embedding import is_lookup
from specexport.passes.quantize_graph import CONTRIB, NBITS, put_in_place
from specexport.passes.quantize_sites import LinearSite, head_node, linear_site
from specexport.passes.transpose_fold import FOLDED
from specexport_runtime.executors.base import Int32Array

_FLOAT, _UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8
_ACCURACY_LEVEL = 4


class KeptWeightPass(CountingPass):
    """Multiply by the integers of a quantized checkpoint, as they are.

    ``com.microsoft.MatMulNBits`` at accuracy level 4 with the checkpoint's own codes and scales; activations are int8
    in the same blocks, token by token. An offset a block, as formats with minima have it, is worth its product with
    the sum of the block's inputs, and that is a small float32 product beside the large one::

        x @ W = MatMulNBits(x, codes, scales) + sum of x over each block @ offsets [K / block, N]

    Embeddings are looked up in the same codes, of which a tied LM head has no copy. What the checkpoint holds in float
    stays float. Counts layers and lookups.

    Args:
        weights: by the name of a traced graph's weight.
        head_ids: token ids that the LM head was cut to, int32 [N]; None if it was not.
        lm_head: keep the LM head and the embedding too; else they are float.
    """

    name = "weight-keep"
    reason = "memory and quality: a quantized checkpoint is not quantized a second time"

    def __init__(
        self, weights: Mapping[str, BlockWeight], head_ids: Int32Array | None = None, *, lm_head: bool = True
    ) -> None:
        self._weights, self._head_ids, self._lm_head = weights, head_ids, lm_head

    def rewrite(self, model: ir.Model) -> int:
        """Replace every product and lookup of a kept weight."""
        graph, sums, changes = model.graph, dict[tuple[ir.Value, int], ir.Value](), 0
        sites = {node: site for node in graph if (site := linear_site(node)) is not None}
        head = None if self._lm_head else head_node(model, set(sites))
        for node in list(graph):
            site = sites.get(node)
            if not self._lm_head and (node is head or is_lookup(node)):
                continue
            if site is not None and (weight := self._find(site.weight, site)) is not None:
                _multiply(graph, site, weight, sums)
                changes += 1
            elif is_lookup(node) and node.inputs[0] is not None:
                table = self._find(node.inputs[0], None)
                changes += table is not None and _look_up(graph, node, table)
        model.opset_imports.setdefault(CONTRIB, 1)
        return changes

    def _find(self, value: ir.Value, site: LinearSite | None) -> BlockWeight | None:
        parts = [self._named(name) for name in value.meta.get(PARTS, [str(value.name)])]
        if not all(part is not None for part in parts):
            return None
        whole = join([part for part in parts if part is not None])
        wanted = None if site is None else (site.width, site.depth)
        return whole if wanted in (None, whole.shape) else None

    def _named(self, name: str) -> BlockWeight | None:
        cut = name.endswith(CUT)
        weight = self._weights.get(name.removesuffix(CUT).removesuffix(FOLDED))
        if weight is None or not cut:
            return weight
        return None if self._head_ids is None else weight.take(self._head_ids)


def kept_form(weights: Mapping[str, BlockWeight], name: str) -> object:
    """What layers must agree in to be joined; None for a float weight."""
    weight = weights.get(name.removesuffix(FOLDED))
    return None if weight is None else weight.form


def _stored(graph: ir.Graph, name: str, weight: BlockWeight) -> tuple[ir.Value, ir.Value]:
    """The codes [N, blocks, bytes] and scales [N, blocks] of a weight, the same for all its readers."""
    width, form = weight.shape[0], weight.form
    shape = [width, weight.num_blocks, form.block * form.bits // 8]
    codes = lazy_weight(graph, f"{name}.codes", _UINT8, shape, weight.packed_codes)
    return codes, lazy_weight(graph, f"{name}.scales", _FLOAT, shape[:2], weight.scales)


def _offsets(graph: ir.Graph, name: str, weight: BlockWeight) -> ir.Value:
    shape = [weight.num_blocks, weight.shape[0]]
    return lazy_weight(graph, f"{name}.offsets", _FLOAT, shape, partial(_turned, weight))


def _turned(weight: BlockWeight) -> np.ndarray:
    return np.ascontiguousarray(weight.offsets().T)


def _multiply(
    graph: ir.Graph, site: LinearSite, weight: BlockWeight, sums: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    emit, shape, form = Emitter(graph), site.node.outputs[0].shape, weight.form
    name = str(site.weight.name).removesuffix(FOLDED)
    result = emit.op(
        NBITS,
        site.source,
        *_stored(graph, name, weight),
        dtype=_FLOAT,
        shape=shape,
        domain=CONTRIB,
        K=site.depth,
        N=site.width,
        bits=form.bits,
        block_size=form.block,
        accuracy_level=_ACCURACY_LEVEL,
    )
    if form.has_offsets:
        of_block = _block_sums(graph, site, form.block, weight.num_blocks, sums)
        small = emit.op("MatMul", of_block, _offsets(graph, name, weight), shape=shape)
        result = emit.op("Add", result, small, shape=shape)
    put_in_place(emit, site, result)


def _block_sums(
    graph: ir.Graph, site: LinearSite, block: int, num_blocks: int, sums: dict[tuple[ir.Value, int], ir.Value]
) -> ir.Value:
    """[..., blocks]: sums of what the layer reads over each block, once for all layers that read it."""
    source = site.source
    if (source, block) not in sums:
        emit = Emitter(graph)
        dims = None if source.shape is None else list(source.shape)[:-1]
        lead = [0] * (2 if dims is None else len(dims))
        cut = emit.op(
            "Reshape",
            source,
            emit.const([*lead, num_blocks, block]),
            shape=None if dims is None else [*dims, num_blocks, block],
        )
        shape = None if dims is None else [*dims, num_blocks]
        sums[source, block] = emit.op("ReduceSum", cut, emit.const([-1]), shape=shape, keepdims=0)
        emit.place(before=site.node)
    return sums[source, block]


def _look_up(graph: ir.Graph, node: ir.Node, weight: BlockWeight) -> bool:
    """Replace a lookup; False if its result is no matrix of tokens, with or without a batch of one."""
    old, ids = node.outputs[0], node.inputs[1]
    if old.shape is None or len(old.shape) not in (2, 3):
        return False
    emit, form, name = Emitter(graph), weight.form, str(node.inputs[0].name)  # type: ignore[union-attr]
    codes, scales = _stored(graph, name, weight)
    ids = emit.reshape(ids, [-1])  # type: ignore[arg-type]
    rows = emit.op("Gather", codes, ids, axis=0)  # [T, blocks, bytes]
    if form.bits == 4:
        halves = [
            emit.op("BitwiseAnd", rows, emit.const(15, "uint8")),
            emit.op("BitShift", rows, emit.const(4, "uint8"), direction="RIGHT"),
        ]
        ends = emit.const([-1])
        pairs = emit.op("Concat", *(emit.op("Unsqueeze", half, ends) for half in halves), axis=-1)
        rows = emit.reshape(pairs, [-1, weight.num_blocks, form.block])
    values = emit.op("Sub", emit.cast(rows, _FLOAT), emit.const(form.zero, "float32"))
    scale = emit.op("Unsqueeze", emit.op("Gather", scales, ids, axis=0), emit.const([-1]))
    values = emit.op("Mul", values, scale)
    if form.has_offsets:
        columns = emit.op("Gather", _offsets(graph, name, weight), ids, axis=1)  # [blocks, T]
        offset = emit.op("Transpose", columns, perm=[1, 0])
        values = emit.op("Add", values, emit.op("Unsqueeze", offset, emit.const([-1])))
    lead = [1, -1] if len(old.shape) == 3 else [-1]
    emit.replace(node, [emit.op("Reshape", values, emit.const([*lead, weight.shape[1]]), shape=old.shape)])
    return True
