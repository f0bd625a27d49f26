"""Gates around the mixer (attention, recurrences) and the MLP of each layer of a lowered graph.

One session then serves a target (every gate on) and the drafts that leave out some of its layers: there is no second
copy of the weights, no second KV cache, and other layers cost nothing but another mask. Each gate is an ``If`` whose
else-branch passes on the residual stream, caches and states. Those of a layer that is off are not copied and not
written: their outputs are bound to the memory of their inputs, and ONNX Runtime's Identity copies nothing onto itself.
That is what the runtime does, not what ONNX promises; a test pins it.

Draft on the Fly (ASD, Metel et al. 2024) chooses layers by the cosine similarity of the stream before and after each
attention, so the graph computes that of all mixers too, for steps that ask for it.

The decoder layer in front of draft heads has a gate too. The first head of a draft reads a new hidden state, and the
later ones read the same again. So a step that asks later heads alone needs no decoder layer: an ``If`` passes on what
the step was fed, and the caches (``layer_gate``).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specexport.lowering.common import value_like
from specexport.lowering.fuse import norm_pass
from specexport.onnx_emit import Emitter, add_input, constant
from specexport.passes.base import CountingPass, Rewrite
from specexport.passes.residual_blocks import Dataflow, ResidualBlock, ResidualBlocks, UnskippableLayer
from specexport_runtime.abi import CONTEXT_ID, INPUT_IDS, LAYER_MASK, LOGIT_ROWS, SIMILARITY, WANT_SIMILARITY
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.ort_gates import LAYER_ON

if TYPE_CHECKING:
    import onnx_ir as ir


LAYER_GATE = "layer-gate"


def gate_passes(
    blocks: ResidualBlocks | None, *, fuse: bool, first_only: bool = False, separate: bool = False
) -> list[CountingPass]:
    """Gates around ``blocks``, where there are any; else norms joined with additions, where ``fuse`` says so."""
    if blocks is not None and blocks.obstacle is None:
        gate = partial(gate_prefix if first_only else partial(gate_layers, separate=separate), blocks=blocks)
        return [Rewrite(LAYER_GATE, "a step runs the layers that it is asked for, of one copy of the weights", gate)]
    return [norm_pass()] if fuse else []


def _find_regions(graph: "ir.Graph", blocks: ResidualBlocks) -> "list[list[ir.Node]]":
    """The nodes of each block."""
    try:
        flow = Dataflow(graph)
        return [flow.find_branch(block)[1] for block in blocks.blocks]
    except UnskippableLayer as obstacle:
        raise CheckFailedError(f"the lowered graph has no clean layers: {obstacle}.") from obstacle


def gate_layers(ir_model: "ir.Model", blocks: ResidualBlocks, *, separate: bool = False) -> int:
    """Put every block into a gate, in place, with one input, or ``separate`` ones as a GPU wants; gives G = 2N."""
    import onnx_ir as ir

    graph, gates = ir_model.graph, len(blocks.gate_kinds)
    regions = _find_regions(graph, blocks)
    names = [f"gate.{i // 2}.{(kind or 'none').lower().replace(' ', '_')}" for i, kind in enumerate(blocks.gate_kinds)]
    switches: Sequence[ir.Value]
    if separate:
        switches = [add_input(graph, LAYER_ON.name.format(i=i), ir.DataType.BOOL, [1]) for i in range(gates)]
    else:
        switches = _split_mask(graph, names)
    wanted = add_input(graph, WANT_SIMILARITY.name, ir.DataType.BOOL, [1])
    cosines = _CosineEmitter(graph, wanted)
    # Last to first: a block's residual is the value before it until that block is gated too.
    for block, region in reversed(list(zip(blocks.blocks, regions, strict=True))):
        gate, total = gate_block(graph, names[block.gate], switches[block.gate], block, region)
        if block.is_mixer:
            cosines.insert_after(gate, block.residual, total)
    cosines.finish()
    return gates


def _split_mask(graph: "ir.Graph", names: "Sequence[str]") -> "Sequence[ir.Value]":
    """The input ``layer_mask`` and its parts, one for each gate of ``names``."""
    import onnx_ir as ir

    mask = add_input(graph, LAYER_MASK.name, ir.DataType.BOOL, [len(names)])
    emit = Emitter(graph)
    attributes = {"axis": 0, "num_outputs": len(names)}
    split = emit.node("Split", [mask], attributes, outputs=len(names), name="layer_mask.split")
    emit.place(before=graph[0])
    for name, switch in zip(names, split.outputs, strict=True):
        switch.name, switch.shape, switch.type = f"{name}.on", ir.Shape([1]), ir.TensorType(ir.DataType.BOOL)
    return split.outputs


def gate_block(
    graph: "ir.Graph", name: str, switch: "ir.Value", block: ResidualBlock, region: "Sequence[ir.Node]"
) -> "tuple[ir.Node, ir.Value]":
    """Move one block into an ``If``; returns it and the stream after it."""
    import onnx_ir as ir

    add = block.total.producer()
    assert add is not None  # noqa: S101 - find_branch has seen it
    body = [*region, add]
    kept = _map_pass_through(graph, block, body)
    outputs = [value_like(old, str(old.name)) for old in kept]
    ins = [value_like(old, f"{name}.skipped.{at}") for at, old in enumerate(kept)]
    emit, skip = Emitter(graph), Emitter(graph)
    for passed, out in zip(kept.values(), ins, strict=True):
        skip.node("Identity", [passed], outputs=[out])
    gate = emit.node("If", [switch], outputs=outputs, name=name)
    emit.place(after=add)
    graph.remove(body)
    for at, (old, new) in enumerate(zip(kept, outputs, strict=True)):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = f"{name}.ran.{at}"
    branches = {"then_branch": ir.Graph([], list(kept), nodes=body, name=f"{name}.run")}
    branches["else_branch"] = ir.Graph([], ins, nodes=skip.nodes, name=f"{name}.skip")
    for key, branch in branches.items():
        gate.attributes.add(ir.AttrGraph(key, branch))
    return gate, outputs[0]


def _map_pass_through(graph: "ir.Graph", block: ResidualBlock, body: "Sequence[ir.Node]") -> "dict[ir.Value, ir.Value]":
    """What leaves a block, and what stands in for it if the block does not run: the stream, then caches and states."""
    by_name = {value.name: value for value in graph.inputs}
    kept = {block.total: block.residual}
    inside = set(body)
    for value in graph.outputs:
        if value.producer() in inside:
            kept[value] = by_name[str(value.name).replace("_out.", ".")]
    return kept


class _CosineEmitter:
    """Adds the cosine of the stream before and after each mixer, right after it: no stream need be kept."""

    def __init__(self, graph: "ir.Graph", wanted: "ir.Value") -> None:
        self._graph = graph
        self._wanted = wanted  # bool [1]
        self._rows: list[ir.Value] = []
        self._axis = constant(graph, "similarity.axis", np.array([-1], np.int64))
        self._shape = constant(graph, "similarity.shape", np.array([1, -1], np.int64))
        self._none = constant(graph, "similarity.none", np.zeros((1, 0), np.float32))

    def insert_after(self, gate: "ir.Node", before: "ir.Value", after: "ir.Value") -> None:
        """Compare ``before`` and ``after`` (…, T, hidden) behind ``gate``: one more row of the output."""
        import onnx_ir as ir

        name = f"{gate.name}.similarity"
        row, wanted, unwanted = (self._row(name + end) for end in ("", ".wanted", ".unwanted"))
        emit, run, skip = Emitter(self._graph), Emitter(self._graph, str(wanted.name)), Emitter(self._graph)
        self._emit_cosine(run, before, after, wanted)
        skip.node("Identity", [self._none], outputs=[unwanted])
        branches = {
            "then_branch": ir.Graph([], [wanted], nodes=run.nodes, name=f"{name}.run"),
            "else_branch": ir.Graph([], [unwanted], nodes=skip.nodes, name=f"{name}.skip"),
        }
        emit.node("If", [self._wanted], branches, outputs=[row], name=name)
        emit.place(after=gate)
        self._rows.insert(0, row)

    def finish(self) -> None:
        """Make the graph's output [N, T] of the rows."""
        emit = Emitter(self._graph)
        # Not T: the size is 0 unless the step wants it.
        shape = [len(self._rows), "num_similarities"]
        output = emit.op("Concat", *self._rows, axis=0, shape=shape, name=SIMILARITY.name)
        output.name = SIMILARITY.name
        emit.place()
        self._graph.outputs.append(output)

    def _emit_cosine(self, emit: Emitter, before: "ir.Value", after: "ir.Value", row: "ir.Value") -> None:
        """From two streams to the row of their cosine similarities; that with a zero vector is 0, as torch has it."""
        import onnx_ir as ir

        before, after = (emit.cast(value, ir.DataType.FLOAT) for value in (before, after))
        before, after = (emit.op("LpNormalization", value, axis=-1, p=2) for value in (before, after))
        total = emit.op("ReduceSum", emit.op("Mul", before, after), self._axis, keepdims=0)
        emit.node("Reshape", [total, self._shape], outputs=[row])

    def _row(self, name: str) -> "ir.Value":
        import onnx_ir as ir

        return ir.Value(name=name, shape=ir.Shape([1, "num_similarities"]), type=ir.TensorType(ir.DataType.FLOAT))


def gate_prefix(ir_model: "ir.Model", blocks: ResidualBlocks) -> int:
    """Run attention and MLP only in steps that ask first heads, in place; returns the runtime's gates: 0."""
    graph = ir_model.graph
    regions = _find_regions(graph, blocks)
    switch = _emit_first_head_test(graph)
    for block, region in reversed(list(zip(blocks.blocks, regions, strict=True))):
        gate_block(graph, f"first.{block.layer}.{block.kind.lower()}", switch, block, region)
    return 0


def _emit_first_head_test(graph: "ir.Graph") -> "ir.Value":
    """Whether a step has no more tokens than logit rows, bool [1]: a first head reads one, a later one more."""
    import onnx_ir as ir

    inputs = {value.name: value for value in graph.inputs}
    emit = Emitter(graph, "asks_first")
    is_token = emit.op("Greater", inputs[INPUT_IDS.name], emit.const(CONTEXT_ID))
    count = emit.op("ReduceSum", emit.cast(is_token, ir.DataType.INT64), emit.const([0]), keepdims=1)
    asked = emit.op("LessOrEqual", count, emit.op("Shape", inputs[LOGIT_ROWS.name]))
    emit.place(before=graph[0])
    return asked
