"""The gate around the decoder layer in front of Hydra heads.

The first head of a draft reads a new hidden state, and the later ones read the same again. So a step that asks later
heads alone needs no decoder layer: an ``If`` passes on what the step was fed, and the caches (``layer_gate``).
"""

from typing import TYPE_CHECKING

from specexport.lowering.layer_gate import gate_block
from specexport.onnx_emit import Emitter
from specexport.passes.residual_blocks import Dataflow, Obstacle, ResidualBlocks
from specexport_runtime.abi import CONTEXT_ID, INPUT_IDS, LOGIT_ROWS
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir


def gate_prefix(ir_model: "ir.Model", blocks: ResidualBlocks) -> int:
    """Run attention and MLP only in steps that ask first heads, in place; returns the gates that the runtime sets: 0.

    ``blocks`` were found on the same graph before it was lowered, without an obstacle. CheckFailedError if the lowering
    has joined a block with something outside it.
    """
    graph = ir_model.graph
    try:
        flow = Dataflow(graph)
        regions = [flow.branch_of(block)[1] for block in blocks.blocks]
    except Obstacle as obstacle:
        raise CheckFailedError(f"the lowered graph has no clean layers: {obstacle}.") from obstacle
    switch = _asks_first(graph)
    for block, region in reversed(list(zip(blocks.blocks, regions, strict=True))):
        gate_block(graph, f"first.{block.layer}.{block.kind.lower()}", switch, block, region)
    return 0


def _asks_first(graph: "ir.Graph") -> "ir.Value":
    """Whether a step has no more tokens than logit rows, bool [1]: a first head reads one, a later one more."""
    import onnx_ir as ir

    inputs = {value.name: value for value in graph.inputs}
    emit = Emitter(graph, "asks_first")
    is_token = emit.op("Greater", inputs[INPUT_IDS.name], emit.const(CONTEXT_ID))
    count = emit.op("ReduceSum", emit.cast(is_token, ir.DataType.INT64), emit.const([0]), keepdims=1)
    asked = emit.op("LessOrEqual", count, emit.op("Shape", inputs[LOGIT_ROWS.name]))
    emit.place(before=graph[0])
    return asked
