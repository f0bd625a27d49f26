"""Where a traced model adds attention, recurrences and MLP to its residual stream.

Found by dataflow alone, so that no model needs special code. A model whose layers can be left out has a stream
``x`` that only additions change: ``a = x + mixer(x)``, then ``b = a + mlp(a)``, which is the next layer's ``x``. A
mixer is an attention, or the recurrences of a layer, or both side by side; a layer may do without an MLP. What happens
inside the branches (norms before and after, biases, scaling, experts) does not matter; what touches the stream itself,
or reads a branch from outside, makes an obstacle: leaving out such a layer would be another model.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from specexport_runtime.abi import K_CACHE_OUT, STATE_OUT, GateKind

_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
_LEAK = "layer {layer}'s {kind} is read beyond the residual stream"


class ResidualBlock(NamedTuple):
    """One addition to the residual stream: ``total = residual + branch(residual)``.

    The two values keep their identity while a graph is lowered; what lies between them need not.
    """

    kind: GateKind
    layer: int  # number of the layer: layers are counted by their mixers
    residual: ir.Value  # the stream before the addition [1, T, hidden]
    total: ir.Value  # the stream after it, the output of an ``Add``

    @property
    def is_mixer(self) -> bool:
        """Whether it looks at other tokens: an attention, a recurrence, or both."""
        return self.kind != "MLP"

    @property
    def gate(self) -> int:
        """Number of its gate: mixers have the even ones."""
        return 2 * self.layer + (not self.is_mixer)


class ResidualBlocks(NamedTuple):
    """The residual blocks of a model, or why they cannot be skipped."""

    obstacle: str | None  # names the layer and what was found there; None if every block can be skipped
    # mixer and MLP of each layer in turn, without the MLPs that are not there; empty if there is an obstacle
    blocks: tuple[ResidualBlock, ...] = ()

    @property
    def gate_kinds(self) -> tuple[GateKind, ...]:
        """What each gate [2N] is for: that of a layer's mixer, then that of its MLP; empty where a layer has none."""
        kinds: list[GateKind] = [""] * (2 * len([block for block in self.blocks if block.is_mixer]))
        for block in self.blocks:
            kinds[block.gate] = block.kind
        return tuple(kinds)


class UnskippableLayer(Exception):  # noqa: N818 - an answer, not an error
    """What keeps a layer from being skipped, as a short phrase."""


class Dataflow:
    """Which nodes read what in a sorted graph that does not change; a node reads what its subgraphs read."""

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = list(graph)
        self.position = {node: at for at, node in enumerate(self.nodes)}
        self.reads = {node: tuple(_iterate_reads(node)) for node in self.nodes}
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

    def find_branch(self, block: ResidualBlock) -> tuple[ir.Value, list[ir.Node]]:
        """The value that a block adds to the stream, and the nodes that compute it from the stream, in order.

        Obstacle if the block is no addition to its residual, the branch does not depend on it, or something besides the
        addition reads the residual or a part of the branch.
        """
        add = block.total.producer()
        if add not in self.position or block.residual not in add.inputs or len(set(add.inputs)) != 2:
            raise UnskippableLayer(f"layer {block.layer}'s {block.kind} is not added to the residual stream")
        branch = next(value for value in add.inputs if value is not block.residual and value is not None)
        region = self.before([branch], self.after([block.residual], self.position[add]))
        if branch.producer() not in region:
            raise UnskippableLayer(f"layer {block.layer}'s {block.kind} does not depend on the residual stream")
        allowed = region | {add}
        made = [block.residual, *(value for node in region for value in node.outputs)]
        if any(node not in allowed for value in made for node in self.readers.get(value, ())):
            raise UnskippableLayer(_LEAK.format(layer=block.layer, kind=block.kind))
        return branch, sorted(region, key=self.position.__getitem__)


def _iterate_reads(node: ir.Node) -> Iterable[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
        for graph in [*graphs, *(attribute.value if attribute.type == ir.AttributeType.GRAPHS else [])]:
            for inner in graph:
                yield from _iterate_reads(inner)
            yield from graph.outputs


def find_residual_blocks(ir_model: ir.Model) -> ResidualBlocks:
    """The blocks of all layers of a traced model, before or after fusions in branches, or the first obstacle met."""
    flow = Dataflow(ir_model.graph)
    mixers = _find_mixers(ir_model.graph)
    rest = sorted(mixers, key=flow.position.__getitem__)
    blocks: list[ResidualBlock] = []
    try:
        if not mixers:
            raise UnskippableLayer("the model has no layer with attention or a recurrence")
        while rest:
            layer = blocks[-1].layer + 1 if blocks else 0
            mixer, own = _find_mixer_block(flow, layer, rest[0], mixers)
            if blocks and mixer.residual is not _skip_views(flow, blocks[-1].total):
                raise UnskippableLayer(f"layer {layer} does not read the residual stream as layer {layer - 1} left it")
            mlp = _find_mlp_block(flow, mixer, mixers)
            blocks += [mixer] if mlp is None else [mixer, mlp]
            rest = [node for node in rest if node not in own]
        _check_caches(flow, ir_model.graph, blocks, mixers)
    except UnskippableLayer as obstacle:
        return ResidualBlocks(str(obstacle))
    return ResidualBlocks(None, tuple(blocks))


def cache_writers(graph: ir.Graph) -> list[ir.Node]:
    """The node of each layer that gives its keys' cache output: the attention, however it is called there."""
    return _find_writers(graph, K_CACHE_OUT.name)


def _find_writers(graph: ir.Graph, name: str) -> list[ir.Node]:
    """The nodes that give the outputs ``name.{i}``, by their numbers."""
    outputs = {value.name: value.producer() for value in graph.outputs}
    nodes = (outputs.get(name.format(i=i)) for i in range(len(outputs)))
    return [node for node in nodes if node is not None]


def _find_mixers(graph: ir.Graph) -> dict[ir.Node, GateKind]:
    """The nodes that write to caches or states, and what they are."""
    recurrences: dict[ir.Node, GateKind] = dict.fromkeys(_find_writers(graph, STATE_OUT.name), "recurrence")
    return recurrences | dict.fromkeys(cache_writers(graph), "attention")


def _find_mixer_block(
    flow: Dataflow, layer: int, first: ir.Node, mixers: dict[ir.Node, GateKind]
) -> tuple[ResidualBlock, set[ir.Node]]:
    """The first addition of something with a mixer's first node to something before it, and the mixer's nodes."""
    after, before = flow.after(first.outputs), flow.before(flow.reads[first])
    for add in sorted(after, key=flow.position.__getitem__):
        if not _is_add(add):
            continue
        for residual in add.inputs:
            if residual is not None and residual.producer() in before:
                return _check_mixer_block(flow, ResidualBlock(mixers[first], layer, residual, add.outputs[0]), mixers)
    raise UnskippableLayer(f"layer {layer}'s {mixers[first]} is not added to the residual stream")


def _check_mixer_block(
    flow: Dataflow, block: ResidualBlock, mixers: dict[ir.Node, GateKind]
) -> tuple[ResidualBlock, set[ir.Node]]:
    """A block's kind and nodes, unless a branch was added on the way; recurrences beside attention are one mixer."""
    branch, region = _require_branch(flow, block)
    own = mixers.keys() & set(region)
    after = flow.after([value for node in own for value in node.outputs]) | own
    from_stream = flow.after([block.residual])
    for add in flow.before([branch], after):
        sources = {value.producer() for value in add.inputs if value is not None} - after
        if _is_add(add) and sources & from_stream:
            raise UnskippableLayer(_describe_parallel(block.layer))
    kinds = {mixers[node] for node in own}
    return block._replace(kind="attention and recurrence" if len(kinds) > 1 else block.kind), own


def _require_branch(flow: Dataflow, block: ResidualBlock) -> tuple[ir.Value, list[ir.Node]]:
    """As ``find_branch``; a stream that is read again after the attention was added names the parallel form."""
    try:
        return flow.find_branch(block)
    except UnskippableLayer as obstacle:
        add = block.total.producer()
        joined = [node for node in flow.readers.get(block.total, ()) if _is_add(node)]
        others = flow.after([block.residual]) - flow.after([block.total])
        beside = {value.producer() for node in joined for value in node.inputs if value is not None} - {add}
        raise (UnskippableLayer(_describe_parallel(block.layer)) if beside & others else obstacle) from None


def _find_mlp_block(flow: Dataflow, mixer: ResidualBlock, mixers: dict[ir.Node, GateKind]) -> ResidualBlock | None:
    """The next addition to the stream; None if that is the next layer's mixer, or there is no other."""
    layer, stream = mixer.layer, _skip_views(flow, mixer.total)
    readers = flow.readers.get(stream, [])
    add = next((node for node in readers if _is_add(node)), None)
    if add is None:
        later = flow.after([stream])
        sums = {node for node in later if _is_add(node) and all(x and x.producer() in later for x in node.inputs)}
        passed = next((node for node in readers if sums & flow.after(node.outputs)), None)
        if passed is not None:  # the last norm and the LM head add nothing but constants
            raise UnskippableLayer(f"layer {layer} passes the residual stream itself through {passed.op_type}")
        return None
    block = ResidualBlock("MLP", layer, stream, add.outputs[0])
    after = flow.after([stream], flow.position[add]) & flow.before(flow.reads[add])
    return None if after & mixers.keys() else block


def _check_caches(
    flow: Dataflow, graph: ir.Graph, blocks: Sequence[ResidualBlock], mixers: dict[ir.Node, GateKind]
) -> None:
    """Every block holds one attention at most, and gives nothing to the caller but its caches and states."""
    for block in blocks:
        _, region = flow.find_branch(block)
        inside = set(region)
        own = mixers.keys() & inside
        if sum(mixers[node] == "attention" for node in own) > 1:
            raise UnskippableLayer(f"layer {block.layer}'s {block.kind} holds the attention of another layer")
        caches = {value for node in own for value in node.outputs}
        given = {value for value in graph.outputs if value.producer() in inside}
        if given - caches or any(value in flow.readers for value in given):
            raise UnskippableLayer(_LEAK.format(layer=block.layer, kind=block.kind))


def _skip_views(flow: Dataflow, stream: ir.Value) -> ir.Value:
    """The stream after reshapes that are all that reads it: OPT takes the batch axis off before its MLP."""
    while True:
        readers = flow.readers.get(stream, [])
        if len(readers) != 1 or readers[0].op_type not in _VIEWS or readers[0].inputs[0] is not stream:
            return stream
        stream = readers[0].outputs[0]


def _is_add(node: ir.Node) -> bool:
    return node.op_type == "Add" and node.domain == ""


def _describe_parallel(layer: int) -> str:
    return f"layer {layer} adds attention and MLP to the residual stream in parallel"
