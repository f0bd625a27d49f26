"""Gates around the attention and the MLP of each layer of a lowered graph.

One session then serves a target (every gate on) and the drafts that leave out some of its layers: there is no second
copy of the weights, no second KV cache, and other layers cost nothing but another mask. Each gate is an ``If`` whose
else-branch passes on the residual stream and the caches. The caches of a layer that is off are not copied and not
written: their outputs are bound to the memory of their inputs, and ONNX Runtime's Identity copies nothing onto itself.
That is what the runtime does, not what ONNX promises; a test pins it.

Draft on the Fly (ASD, Metel et al. 2024) chooses layers by the cosine similarity of the stream before and after each
attention, so the graph computes that too, for steps that ask for it.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specexport.passes.residual_blocks import Dataflow, Obstacle, ResidualBlock, ResidualBlocks
from specexport_runtime.abi import LAYER_MASK, SIMILARITY, WANT_SIMILARITY
from specexport_runtime.errors import CheckFailedError


def gate_layers(ir_model: ir.Model, blocks: ResidualBlocks) -> int:
    """Put every block behind a gate, in place.

    The graph gets the inputs ``layer_mask`` and ``want_similarity`` and the output ``attention_similarity``.

    Args:
        ir_model: the lowered model.
        blocks: found on the same model before it was lowered, without an obstacle.

    Returns:
        the number of gates G = 2N.

    Raises:
        CheckFailedError: the lowering has joined a block with something outside it.
    """
    graph, gates = ir_model.graph, len(blocks.blocks)
    try:
        flow = Dataflow(graph)
        regions = [flow.branch_of(block)[1] for block in blocks.blocks]
    except Obstacle as obstacle:
        raise CheckFailedError(f"the lowered graph has no clean layers: {obstacle}.") from obstacle
    mask = _input(graph, LAYER_MASK.name, gates)
    wanted = _input(graph, WANT_SIMILARITY.name, 1)
    switches = ir.node("Split", [mask], {"axis": 0, "num_outputs": gates}, num_outputs=gates, name="layer_mask.split")
    graph.insert_before(graph[0], switches)
    cosines = _Cosines(graph, wanted)
    # Last to first: a block's residual is the value before it until that block is gated too.
    for switch, block, region in reversed(list(zip(switches.outputs, blocks.blocks, regions, strict=True))):
        name = f"gate.{block.layer}.{block.kind.lower()}"
        switch.name, switch.shape, switch.type = f"{name}.on", ir.Shape([1]), ir.TensorType(ir.DataType.BOOL)
        gate, total = _gate(graph, name, switch, block, region)
        if block.kind == "attention":
            cosines.insert_after(gate, block.residual, total)
    cosines.finish()
    return gates


def _input(graph: ir.Graph, name: str, size: int) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape([size]), type=ir.TensorType(ir.DataType.BOOL))
    graph.inputs.append(value)
    return value


def _gate(
    graph: ir.Graph, name: str, switch: ir.Value, block: ResidualBlock, region: Sequence[ir.Node]
) -> tuple[ir.Node, ir.Value]:
    """Move one block into an ``If``; returns it and the stream behind it."""
    add = block.total.producer()
    assert add is not None  # noqa: S101 - branch_of has seen it
    body = [*region, add]
    kept = _passed_on(graph, block, body)
    outputs = [_like(old, str(old.name)) for old in kept]
    ins = [_like(old, f"{name}.skipped.{at}") for at, old in enumerate(kept)]
    skip = [ir.node("Identity", [passed], outputs=[out]) for passed, out in zip(kept.values(), ins, strict=True)]
    gate = ir.node("If", [switch], outputs=outputs, name=name)
    graph.insert_after(add, gate)
    graph.remove(body)
    for at, (old, new) in enumerate(zip(kept, outputs, strict=True)):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = f"{name}.ran.{at}"
    branches = {"then_branch": ir.Graph([], list(kept), nodes=body, name=f"{name}.run")}
    branches["else_branch"] = ir.Graph([], ins, nodes=skip, name=f"{name}.skip")
    for key, branch in branches.items():
        gate.attributes.add(ir.AttrGraph(key, branch))
    return gate, outputs[0]


def _passed_on(graph: ir.Graph, block: ResidualBlock, body: Sequence[ir.Node]) -> dict[ir.Value, ir.Value]:
    """What leaves a block, and what stands in for it if the block does not run: the stream first, then the caches."""
    by_name = {value.name: value for value in graph.inputs}
    kept = {block.total: block.residual}
    inside = set(body)
    for value in graph.outputs:
        if value.producer() in inside:
            kept[value] = by_name[str(value.name).replace("_cache_out.", "_cache.")]
    return kept


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)


class _Cosines:
    """Adds the cosine similarity of the stream before and after each attention, for steps that want it.

    Each is computed behind its attention, not all of them at the end: streams of other layers need not be kept.

    Args:
        graph: the graph.
        wanted: bool [1].
    """

    def __init__(self, graph: ir.Graph, wanted: ir.Value) -> None:
        self._graph = graph
        self._wanted = wanted
        self._rows: list[ir.Value] = []
        self._axis = self._constant("axis", np.array([-1], np.int64))
        self._shape = self._constant("shape", np.array([1, -1], np.int64))
        self._none = self._constant("none", np.zeros((1, 0), np.float32))

    def insert_after(self, gate: ir.Node, before: ir.Value, after: ir.Value) -> None:
        """Compare ``before`` and ``after`` (…, T, hidden) behind ``gate``: one more row of the output, ahead of others.

        Layers come last to first.
        """
        name = f"{gate.name}.similarity"
        row, wanted, unwanted = (self._row(name + end) for end in ("", ".wanted", ".unwanted"))
        nodes = self._cosine(before, after, wanted)
        compare = ir.node("If", [self._wanted], outputs=[row], name=name)
        skip = [ir.node("Identity", [self._none], outputs=[unwanted])]
        compare.attributes.add(ir.AttrGraph("then_branch", ir.Graph([], [wanted], nodes=nodes, name=f"{name}.run")))
        compare.attributes.add(ir.AttrGraph("else_branch", ir.Graph([], [unwanted], nodes=skip, name=f"{name}.skip")))
        self._graph.insert_after(gate, compare)
        self._rows.insert(0, row)

    def finish(self) -> None:
        """Make the graph's output [N, T] of the rows."""
        join = ir.node("Concat", self._rows, {"axis": 0}, name=SIMILARITY.name)
        output = join.outputs[0]
        # Not T: the size is 0 unless the step wants it.
        output.name, output.shape = SIMILARITY.name, ir.Shape([len(self._rows), "num_similarities"])
        output.type = ir.TensorType(ir.DataType.FLOAT)
        self._graph.append(join)
        self._graph.outputs.append(output)

    def _cosine(self, before: ir.Value, after: ir.Value, row: ir.Value) -> list[ir.Node]:
        """Nodes from two streams to their cosine similarities; that with a zero vector is 0, as torch has it."""
        nodes: list[ir.Node] = []

        def add(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes))
            nodes[-1].outputs[0].name = f"{row.name}.{len(nodes)}"  # names must differ between subgraphs
            return nodes[-1].outputs[0]

        if before.dtype != ir.DataType.FLOAT:
            before, after = (add("Cast", value, to=int(ir.DataType.FLOAT)) for value in (before, after))
        before, after = (add("LpNormalization", value, axis=-1, p=2) for value in (before, after))
        product = add("Mul", before, after)
        total = add("ReduceSum", product, self._axis, keepdims=0)
        nodes.append(ir.node("Reshape", [total, self._shape], outputs=[row]))
        return nodes

    def _row(self, name: str) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape([1, "num_similarities"]), type=ir.TensorType(ir.DataType.FLOAT))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=f"similarity.{name}", const_value=ir.tensor(array, name=f"similarity.{name}"))
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self._graph.initializers[str(value.name)] = value
        return value
