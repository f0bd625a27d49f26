"""Linear layers and embeddings with the integers of a quantized checkpoint."""

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir

from specexport.onnx_emit import Emitter, Together, lazy_weight
from specexport.passes.base import AS_STORED, CountingPass
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


class _Kept:
    """A weight in a graph: its codes, and its scales and offsets as they are stored, or as what is made of them.

    A product wants these in float32, of all rows. Where the checkpoint has them as small integers, so has the engine's
    file, and nodes make them float; ONNX Runtime does that once, when it loads the engine.

    Args:
        graph: the graph.
        name: of the weight.
        weight: the weight.
    """

    def __init__(self, graph: ir.Graph, name: str, weight: BlockWeight) -> None:
        self._graph, self._name, self._weight = graph, name, weight
        self._made = Together(weight.parts)

    def codes(self) -> ir.Value:
        """The codes [N, blocks, bytes], the same for all readers."""
        weight = self._weight
        shape = [weight.shape[0], weight.num_blocks, weight.form.block * weight.form.bits // 8]
        return self._stored("codes", _UINT8, shape)

    def scales(self, emit: Emitter, ids: ir.Value | None = None) -> ir.Value:
        """float32 [N, blocks], or of the rows ``ids`` [T]: [T, blocks]."""
        weight = self._weight
        if weight.spread is None:
            whole = self._stored("scales", _FLOAT, self._by_block())
            return whole if ids is None else emit.op("Gather", whole, ids, axis=0)
        return self._product(emit, ids, "base", "levels" if weight.spread.levels else "")

    def offsets(self, emit: Emitter, scales: ir.Value, ids: ir.Value | None = None) -> ir.Value:
        """The same of the offsets; ``scales`` are those of the same rows."""
        spread = self._weight.spread
        if spread is None:
            whole = self._stored("offsets", _FLOAT, self._by_block())
            return whole if ids is None else emit.op("Gather", whole, ids, axis=0)
        shifted = emit.op("Mul", scales, emit.const(spread.shift, "float32"))
        return emit.op("Add", shifted, self._product(emit, ids, "least", "minima" if spread.minima else ""))

    def _by_block(self) -> list[int]:
        return [self._weight.shape[0], self._weight.num_blocks]

    def _product(self, emit: Emitter, ids: ir.Value | None, base: str, levels: str) -> ir.Value:
        """A number for several blocks times one for each; or the number alone."""
        width, depth = self._weight.shape
        values = self._weight.spread.values  # type: ignore[union-attr]
        found = self._part(emit, ids, base, ir.DataType.FLOAT16, [width, depth // values])
        if not levels:
            return found
        of_block = self._part(emit, ids, levels, ir.DataType.INT8, self._by_block())
        cut = emit.reshape(of_block, [-1, depth // values, values // self._weight.form.block])
        product = emit.op("Mul", cut, emit.op("Unsqueeze", found, emit.const([-1])))
        return emit.reshape(product, [-1, self._weight.num_blocks])

    def _part(self, emit: Emitter, ids: ir.Value | None, name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        stored = self._stored(name, dtype, shape)
        stored.meta[AS_STORED] = True
        return emit.cast(stored if ids is None else emit.op("Gather", stored, ids, axis=0), _FLOAT)

    def _stored(self, name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        make = partial(self._made.part, self._weight.part_names.index(name))
        return lazy_weight(self._graph, f"{self._name}.{name}", dtype, shape, make)


def _multiply(
    graph: ir.Graph, site: LinearSite, weight: BlockWeight, sums: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    emit, shape, form = Emitter(graph), site.node.outputs[0].shape, weight.form
    name = str(site.weight.name).removesuffix(FOLDED)
    made = _Kept(graph, name, weight)
    scales = made.scales(emit)
    result = emit.op(
        NBITS,
        site.source,
        made.codes(),
        scales,
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
        offsets = emit.op("Transpose", made.offsets(emit, scales), perm=[1, 0])
        small = emit.op("MatMul", of_block, offsets, shape=shape)
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
    made = _Kept(graph, name, weight)
    ids = emit.reshape(ids, [-1])  # type: ignore[arg-type]
    rows = emit.op("Gather", made.codes(), ids, axis=0)  # [T, blocks, bytes]
    if form.bits == 4:
        halves = [
            emit.op("BitwiseAnd", rows, emit.const(15, "uint8")),
            emit.op("BitShift", rows, emit.const(4, "uint8"), direction="RIGHT"),
        ]
        ends = emit.const([-1])
        pairs = emit.op("Concat", *(emit.op("Unsqueeze", half, ends) for half in halves), axis=-1)
        rows = emit.reshape(pairs, [-1, weight.num_blocks, form.block])
    values = emit.op("Sub", emit.cast(rows, _FLOAT), emit.const(form.zero, "float32"))
    scales = made.scales(emit, ids)
    values = emit.op("Mul", values, emit.op("Unsqueeze", scales, emit.const([-1])))
    if form.has_offsets:
        values = emit.op("Add", values, emit.op("Unsqueeze", made.offsets(emit, scales, ids), emit.const([-1])))
    lead = [1, -1] if len(old.shape) == 3 else [-1]
    emit.replace(node, [emit.op("Reshape", values, emit.const([*lead, weight.shape[1]]), shape=old.shape)])
    return True
