"""Where a traced model adds attention and MLP to its residual stream.

Found by dataflow alone, so that no model needs code of its own. A model whose layers can be left out has a stream
``x`` that only additions change: ``a = x + attention(x)``, then ``b = a + mlp(a)``, which is the next layer's ``x``.
What happens inside the branches (norms before and after, biases, scaling, experts) does not matter; what touches the
stream itself, or reads a branch from outside, makes an obstacle: leaving out such a layer would be another model.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

import onnx_ir as ir

from specexport_runtime.abi import K_CACHE_OUT

_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
_LEAK = "layer {layer}'s {kind} is read beyond the residual stream"


class ResidualBlock(NamedTuple):
    """One addition to the residual stream: ``total = residual + branch(residual)``.

    The two values keep their identity while a graph is lowered; what lies between them need not.

    Attributes:
        kind: what the branch is.
        layer: number of the layer.
        residual: the stream before the addition [1, T, hidden].
        total: the stream after it, the output of an ``Add``.
    """

    kind: Literal["attention", "MLP"]
    layer: int
    residual: ir.Value
    total: ir.Value


class ResidualBlocks(NamedTuple):
    """The residual blocks of a model, or why they cannot be skipped.

    Attributes:
        obstacle: a short phrase that names the layer and what was found there; None if every block can be skipped.
        blocks: attention and MLP of each layer in turn, 2N of them; empty if there is an obstacle.
    """

    obstacle: str | None
    blocks: tuple[ResidualBlock, ...] = ()


class Obstacle(Exception):  # noqa: N818 - an answer, not an error
    """What keeps a layer from being skipped, as a short phrase."""


class Dataflow:
    """Who reads what in a graph; a node with subgraphs reads what they read.

    Args:
        graph: sorted topologically, as ONNX demands. Must not change while this is in use.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = list(graph)
        self.position = {node: at for at, node in enumerate(self.nodes)}
        self.reads = {node: tuple(_read_by(node)) for node in self.nodes}
        self.readers: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self.reads.items():
            for value in dict.fromkeys(values):
                self.readers.setdefault(value, []).append(node)

    def after(self, values: Iterable[ir.Value], end: int | None = None) -> set[ir.Node]:
        """Nodes before position ``end`` that depend on one of ``values``."""
        found: set[ir.Node] = set()
        rest = list(values)
        while rest:
            for node in self.readers.get(rest.pop(), ()):
                if node not in found and (end is None or self.position[node] < end):
                    found.add(node)
                    rest += node.outputs
        return found

    def before(self, values: Iterable[ir.Value], within: set[ir.Node] | None = None) -> set[ir.Node]:
        """Nodes (of ``within``, if given) that one of ``values`` depends on."""
        found: set[ir.Node] = set()
        rest = list(values)
        while rest:
            node = rest.pop().producer()
            if node in self.position and node not in found and (within is None or node in within):
                found.add(node)
                rest += self.reads[node]
        return found

    def branch_of(self, block: ResidualBlock) -> tuple[ir.Value, list[ir.Node]]:
        """The value that a block adds to the stream, and the nodes that compute it from the stream, in order.

        Raises:
            Obstacle: the block is no addition to its residual, the branch does not depend on it, or something besides
                the addition reads the residual or a part of the branch.
        """
        add = block.total.producer()
        if add not in self.position or block.residual not in add.inputs or len(set(add.inputs)) != 2:
            raise Obstacle(f"layer {block.layer}'s {block.kind} is not added to the residual stream")
        branch = next(value for value in add.inputs if value is not block.residual and value is not None)
        region = self.before([branch], self.after([block.residual], self.position[add]))
        if branch.producer() not in region:
            raise Obstacle(f"layer {block.layer}'s {block.kind} does not depend on the residual stream")
        allowed = region | {add}
        made = [block.residual, *(value for node in region for value in node.outputs)]
        if any(node not in allowed for value in made for node in self.readers.get(value, ())):
            raise Obstacle(_LEAK.format(layer=block.layer, kind=block.kind))
        return branch, sorted(region, key=self.position.__getitem__)


def _read_by(node: ir.Node) -> Iterable[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
        for graph in [*graphs, *(attribute.value if attribute.type == ir.AttributeType.GRAPHS else [])]:
            for inner in graph:
                yield from _read_by(inner)
            yield from graph.outputs


def find_residual_blocks(ir_model: ir.Model) -> ResidualBlocks:
    """Find attention and MLP of every layer of a traced model.

    Args:
        ir_model: the model, before or after fusions inside the branches; not changed.

    Returns:
        the blocks of all layers, or the first obstacle met.
    """
    flow = Dataflow(ir_model.graph)
    attentions = cache_writers(ir_model.graph)
    blocks: list[ResidualBlock] = []
    try:
        if not attentions:
            raise Obstacle("the model has no attention layer")
        for layer, node in enumerate(attentions):
            attention = _attention_block(flow, layer, node)
            if blocks and attention.residual is not _through_views(flow, blocks[-1].total):
                raise Obstacle(f"layer {layer} does not read the residual stream as layer {layer - 1} left it")
            blocks += [attention, _mlp_block(flow, attention, attentions)]
        _check_caches(flow, ir_model.graph, blocks, attentions)
    except Obstacle as obstacle:
        return ResidualBlocks(str(obstacle))
    return ResidualBlocks(None, tuple(blocks))


def cache_writers(graph: ir.Graph) -> list[ir.Node]:
    """The node of each layer that gives its keys' cache output: the attention, however it is called there."""
    outputs = {value.name: value.producer() for value in graph.outputs}
    nodes = (outputs.get(K_CACHE_OUT.name.format(i=layer)) for layer in range(len(outputs)))
    return [node for node in nodes if node is not None]


def _attention_block(flow: Dataflow, layer: int, attention: ir.Node) -> ResidualBlock:
    """The first addition of something with the attention to something before it."""
    after, before = flow.after(attention.outputs), flow.before(flow.reads[attention])
    for add in sorted(after, key=flow.position.__getitem__):
        if not _is_add(add):
            continue
        for residual in add.inputs:
            if residual is not None and residual.producer() in before:
                block = ResidualBlock("attention", layer, residual, add.outputs[0])
                return _checked_attention(flow, block, after | {attention})
    raise Obstacle(f"layer {layer}'s attention is not added to the residual stream")


def _checked_attention(flow: Dataflow, block: ResidualBlock, after: set[ir.Node]) -> ResidualBlock:
    """The block, unless a second branch was added to the attention on its way to the stream."""
    branch, _ = _any_branch(flow, block)
    from_stream = flow.after([block.residual])
    for add in flow.before([branch], after):
        sources = {value.producer() for value in add.inputs if value is not None} - after
        if _is_add(add) and sources & from_stream:
            raise Obstacle(_parallel(block.layer))
    return block


def _any_branch(flow: Dataflow, block: ResidualBlock) -> tuple[ir.Value, list[ir.Node]]:
    """As ``branch_of``; a stream that is read again after the attention was added names the parallel form."""
    try:
        return flow.branch_of(block)
    except Obstacle as obstacle:
        add = block.total.producer()
        joined = [node for node in flow.readers.get(block.total, ()) if _is_add(node)]
        others = flow.after([block.residual]) - flow.after([block.total])
        beside = {value.producer() for node in joined for value in node.inputs if value is not None} - {add}
        raise (Obstacle(_parallel(block.layer)) if beside & others else obstacle) from None


def _mlp_block(flow: Dataflow, attention: ResidualBlock, attentions: Seq[ir.Node]) -> ResidualBlock:
    """The next addition to the stream; it may hold no attention."""
    layer, stream = attention.layer, _through_views(flow, attention.total)
    readers = flow.readers.get(stream, [])
    add = next((node for node in readers if _is_add(node)), None)
    if add is None:
        passed = next((node for node in readers if any(map(_is_add, flow.after(node.outputs)))), None)
        if passed is None:
            raise Obstacle(f"layer {layer} has no MLP")
        raise Obstacle(f"layer {layer} passes the residual stream itself through {passed.op_type}")
    block = ResidualBlock("MLP", layer, stream, add.outputs[0])
    _, region = flow.branch_of(block)
    if set(region) & set(attentions):
        raise Obstacle(f"layer {layer} has no MLP of its own")
    return block


def _check_caches(flow: Dataflow, graph: ir.Graph, blocks: Seq[ResidualBlock], attentions: Seq[ir.Node]) -> None:
    """Every layer holds its own attention and no other, and gives nothing to the caller but its caches."""
    for block in blocks:
        _, region = flow.branch_of(block)
        inside = set(region)
        expected = {attentions[block.layer]} if block.kind == "attention" else set()
        if inside & set(attentions) != expected:
            raise Obstacle(f"layer {block.layer}'s {block.kind} holds the attention of another layer")
        caches = {value for node in expected for value in node.outputs}
        given = {value for value in graph.outputs if value.producer() in inside}
        if given - caches or any(value in flow.readers for value in given):
            raise Obstacle(_LEAK.format(layer=block.layer, kind=block.kind))


def _through_views(flow: Dataflow, stream: ir.Value) -> ir.Value:
    """The stream behind reshapes that are all that reads it: OPT takes the batch axis off before its MLP."""
    while True:
        readers = flow.readers.get(stream, [])
        if len(readers) != 1 or readers[0].op_type not in _VIEWS or readers[0].inputs[0] is not stream:
            return stream
        stream = readers[0].outputs[0]


def _is_add(node: ir.Node) -> bool:
    return node.op_type == "Add" and node.domain == ""


def _parallel(layer: int) -> str:
    return f"layer {layer} adds attention and MLP to the residual stream in parallel"
