"""The gate around what a target computes for its draft head: an ``If``, taken in steps that want features."""

from typing import TYPE_CHECKING

import numpy as np

from specexport.lowering.common import value_like
from specexport.onnx_emit import Emitter, add_input, constant
from specexport.passes.base import CountingPass, Rewrite
from specexport.passes.residual_blocks import Dataflow
from specexport_runtime.abi import FEATURES, WANT_FEATURES
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir


def feature_size(ir_model: "ir.Model") -> int:
    """E of a target's graph; 0 where it gives no features."""
    output = next((value for value in ir_model.graph.outputs if value.name == FEATURES.name), None)
    if output is None or output.shape is None:
        return 0
    width = output.shape[1]
    if not isinstance(width, int):
        raise CheckFailedError(f"features have no fixed width: {output.shape}.")
    return width


def feature_pass() -> CountingPass:
    """:func:`gate_features` as a pass of a lowering."""
    return Rewrite("feature-gate", "features cost nothing in steps after which no head drafts", gate_features)


def gate_features(ir_model: "ir.Model") -> int:
    """Compute features only in steps that want them, in place; returns E, or 0 for a graph without features."""
    import onnx_ir as ir

    size = feature_size(ir_model)
    if not size:
        return 0
    graph = ir_model.graph
    output = next(value for value in graph.outputs if value.name == FEATURES.name)
    flow = Dataflow(graph)
    needed = flow.before([value for value in graph.outputs if value is not output])
    region = sorted(flow.before([output]) - needed, key=flow.position.__getitem__)
    if output.producer() not in region:
        raise CheckFailedError("the features are what the model computes anyway: there is nothing to leave out.")
    none = constant(graph, "features.none", np.zeros((0, size), np.float32))
    wanted = add_input(graph, WANT_FEATURES.name, ir.DataType.BOOL, [1])
    skipped, given = value_like(output, "features.skipped"), value_like(output, FEATURES.name)
    given.shape = ir.Shape(["num_features", size])  # not T: there are none unless the step wants them
    emit, skip = Emitter(graph), Emitter(graph)
    skip.node("Identity", [none], outputs=[skipped])
    gate = emit.node("If", [wanted], outputs=[given], name="features.gate")
    emit.place(after=region[-1])
    graph.outputs[graph.outputs.index(output)] = given
    graph.remove(region)
    output.name = "features.ran"
    run = ir.Graph([], [output], nodes=region, name="features.run")
    gate.attributes.add(ir.AttrGraph("then_branch", run))
    gate.attributes.add(ir.AttrGraph("else_branch", ir.Graph([], [skipped], nodes=skip.nodes, name="features.skip")))
    return size


def drop_features(ir_model: "ir.Model") -> None:
    """Take the features out of a graph that no head reads, in place."""
    import onnx_ir.passes.common as common_passes

    graph = ir_model.graph
    found = [value for value in graph.outputs if value.name == FEATURES.name]
    for value in found:
        graph.outputs.remove(value)
    if found:
        common_passes.RemoveUnusedNodesPass()(ir_model)
