"""Adapters that requests choose (LoRA): small products beside linear layers, for the tokens that want them.

::

    out [T, N] ──────────────────────────────────────────────────────── ScatterND(+) ─▶ adapted [T, N]
    source [T, K] ─ If any token has an adapter:                          ▲ none: no rows
                      for each adapter: its tokens' rows @ down @ up ──── Concat

A step whose tokens have no adapter pays for an ``If`` a layer and adds no rows, in place. Tokens of several adapters
may share a step: each token is in one of them, and reads that one's matrices only. Both products are our own operator
for float weights, so that a token's bits know no other token of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport.onnx_emit import Emitter, add_input, constant, lazy_tensor
from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import CountingPass, Rewrite
from specexport.passes.block_linear import emit_block_linear, pack_floats
from specexport.passes.low_rank import MARK, Adapter, LowRank
from specexport_runtime.abi import ADAPTER_IDS, OP_DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


class _Site(NamedTuple):
    """A marked layer."""

    node: "ir.Node"  # the mark
    parts: tuple[str, ...]  # names of the weights that it was joined from, in order
    widths: tuple[int, ...]  # outputs of each

    @property
    def stem(self) -> str:
        """Beginning of the names of what belongs to it."""
        return f"{self.parts[0]}.lora"


class _Block(NamedTuple):
    """The outputs that one adapted layer of a site gives, with neighbours that the adapter leaves alone."""

    own: LowRank  # what the adapter adds
    before: int  # outputs of neighbours on the left
    start: int  # where its own outputs begin in the site
    after: int  # outputs of neighbours on the right

    @property
    def width(self) -> int:
        """All of its outputs."""
        return self.before + self.own.shape[0] + self.after


def adapter_pass(adapters: Sequence[Adapter]) -> CountingPass:
    """:func:`expand_adapters` as the last pass of a lowering: marks are in the branches of gates by then."""
    expand = partial(expand_adapters, adapters=adapters)
    return Rewrite("adapter-expand", "tokens of several adapters share a step, and others do not pay for them", expand)


def expand_adapters(ir_model: "ir.Model", adapters: Sequence[Adapter]) -> int:
    """Put the products in the place of all marks, in place; returns the number of layers. ``adapters`` count from 1."""
    import onnx_ir as ir

    graph = ir_model.graph
    sites = [
        _read_site(node)
        for node in ir.traversal.RecursiveGraphIterator(graph)
        if (node.op_type, node.domain) == (MARK, OP_DOMAIN)
    ]
    if not sites:
        return 0
    ids = add_input(graph, ADAPTER_IDS.name, ir.DataType.INT64, [DIM_NAMES["T"]])
    chosen = _AdapterTokens(graph, ids, len(adapters))
    for site in sites:
        _expand(graph, site, adapters, chosen)
    chosen.place()
    return len(sites)


def _read_site(node: "ir.Node") -> _Site:
    parts, widths = node.attributes["parts"].as_strings(), node.attributes["widths"].as_ints()
    return _Site(node, tuple(parts), tuple(widths))


class _AdapterTokens:
    """Which tokens of a step have which adapter: computed once a step."""

    def __init__(self, graph: "ir.Graph", ids: "ir.Value", count: int) -> None:
        self._graph, self._emit = graph, Emitter(graph, "lora")
        emit = self._emit
        most = emit.op("ReduceMax", ids, emit.const([0]), shape=[1], keepdims=1)
        self.any = emit.op("Greater", most, emit.const([0]), shape=[1])  # whether a token has one, bool [1]
        # tokens of each adapter, int64 [t]
        self.tokens = [
            emit.reshape(emit.op("NonZero", emit.op("Equal", ids, emit.const(number))), [-1])
            for number in range(1, count + 1)
        ]
        self._places: dict[tuple[tuple[int, ...], int], ir.Value] = {}

    def places(self, adapters: tuple[int, ...], rank: int) -> "ir.Value":
        """Where in a tensor [T, N] (``rank`` 2) or [1, T, N] (3) rows of these adapters go, one after the other."""
        key = adapters, rank
        if key not in self._places:
            emit, tokens = self._emit, [self.tokens[number] for number in adapters]
            rows = tokens[0] if len(tokens) == 1 else emit.op("Concat", *tokens, axis=0)
            rows = emit.reshape(rows, [-1, 1])
            if rank == 3:
                first = emit.op("Sub", rows, rows)
                rows = emit.reshape(emit.op("Concat", first, rows, axis=1), [1, -1, 2])
            self._places[key] = rows
        return self._places[key]

    def place(self) -> None:
        """Put all of it at the top of the graph."""
        self._emit.place(before=self._graph[0])


def _expand(graph: "ir.Graph", site: _Site, adapters: Sequence[Adapter], chosen: _AdapterTokens) -> None:
    """Put the products of one layer in the place of its mark."""
    out, source = site.node.inputs[:2]
    assert out is not None and source is not None and source.shape is not None  # noqa: S101 PT018 - marked so
    rank, width = len(source.shape), sum(site.widths)
    numbers = tuple(i for i, adapter in enumerate(adapters) if any(part in adapter for part in site.parts))
    run = Emitter(graph, f"{site.stem}.run")
    added = [_product(run, site, i, adapters[i], chosen.tokens[i], rank) for i in numbers]
    if len(added) > 1:
        added = [run.op("Concat", *added, axis=rank - 2)]
    emit, owner = Emitter(graph, site.stem), site.node.graph
    assert owner is not None  # noqa: S101 - it was found there
    rows = _emit_gated(emit, chosen.any, _set_type(added[0], rank, width), run, rank)
    result = emit.op("ScatterND", out, chosen.places(numbers, rank), rows, shape=out.shape, reduction="add")
    old = site.node.outputs[0]
    owner.insert_before(site.node, emit.nodes)
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    owner.remove(site.node, safe=True)


def _emit_gated(emit: Emitter, wanted: "ir.Value", rows: "ir.Value", run: Emitter, rank: int) -> "ir.Value":
    """``rows``, which ``run`` computes, where they are wanted; else none."""
    import onnx_ir as ir

    assert rows.shape is not None  # noqa: S101 - typed
    width = int(str(rows.shape[-1]))
    # Not an initializer: the graph for padded KV, which shares the weights of one with gates, has this branch alone.
    skip, empty = Emitter(emit.graph, f"{rows.name}.skip"), np.zeros((1, 0, width)[3 - rank :], np.float32)
    nothing = _set_type(skip.node("Constant", [], {"value": ir.tensor(empty)}).outputs[0], rank, width)
    branches = {
        "then_branch": ir.Graph([], [rows], nodes=run.nodes, name=f"{rows.name}.then"),
        "else_branch": ir.Graph([], [nothing], nodes=skip.nodes, name=f"{rows.name}.else"),
    }
    return _set_type(emit.node("If", [wanted], branches).outputs[0], rank, width)


def _set_type(value: "ir.Value", rank: int, width: int) -> "ir.Value":
    """``value`` with its type; how many rows it has, the step decides."""
    import onnx_ir as ir

    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*[1][: rank - 2], None, width])
    return value


def _product(emit: Emitter, site: _Site, number: int, adapter: Adapter, tokens: "ir.Value", rank: int) -> "ir.Value":
    """What one adapter adds to the rows of its tokens, [t, N] or [1, t, N]."""
    stem, blocks = f"{site.stem}.{number + 1}", list(_blocks(site, adapter))
    ranks = [block.own.rank for block in blocks]
    rows = emit.op("Gather", site.node.inputs[1], tokens, axis=rank - 2)
    hidden = [_linear(emit, rows, f"{stem}.down", [sum(ranks), blocks[0].own.shape[1]], partial(_down, blocks))]
    if len(blocks) > 1:
        sizes = constant(emit.graph, f"lora.ranks.{'_'.join(map(str, ranks))}", np.array(ranks, np.int64))
        hidden = list(emit.node("Split", [hidden[0], sizes], {"axis": -1}, outputs=len(blocks)).outputs)
    added = [
        _linear(emit, value, f"{stem}.up.{at}", [block.width, block.own.rank], partial(_up, block))
        for at, (block, value) in enumerate(zip(blocks, hidden, strict=True))
    ]
    return added[0] if len(added) == 1 else emit.op("Concat", *added, axis=-1)


def _linear(
    emit: Emitter, source: "ir.Value", name: str, shape: list[int], make: Callable[[], np.ndarray]
) -> "ir.Value":
    """A product with a float weight [N, K]."""
    return emit_block_linear(emit, source, name, pack_floats(lazy_tensor(name, "FLOAT", shape, make), turned=True))


def _blocks(site: _Site, adapter: Adapter) -> Iterator[_Block]:
    """The layers of a site that an adapter changes; what it leaves alone goes to the one before, or after it."""
    before, start, pending = 0, 0, None
    for part, width in zip(site.parts, site.widths, strict=True):
        own = adapter.get(part)
        if own is not None:
            if pending is not None:
                yield pending
            pending = _Block(own, before, start, 0)
            before = 0
        elif pending is not None:
            pending = pending._replace(after=pending.after + width)
        else:
            before += width
        start += width
    if pending is not None:
        yield pending


def _down(blocks: Sequence[_Block]) -> np.ndarray:
    """[all r, K]."""
    return np.concatenate([block.own.down() for block in blocks]).astype(np.float32, copy=False)


def _up(block: _Block) -> np.ndarray:
    """[N, r] with zeros for the neighbours' outputs."""
    return np.pad(block.own.up(), ((block.before, block.after), (0, 0))).astype(np.float32, copy=False)
