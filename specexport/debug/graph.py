"""A graph of a bundle's engine, made so that each of its tensors can be looked at and replaced, and its runs.

Branches that run take the place of their ``If`` nodes: nothing inside one can be an output of the graph.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import onnx_ir as ir

from specexport.lowering.fuse import remove_dead_nodes
from specexport.onnx_emit import Emitter
from specexport_runtime.abi import GATE_INPUTS, SIMILARITY
from specexport_runtime.errors import BundleError

Tensors = dict[str, npt.NDArray[Any]]
_GATE = "gate."
IN, NUDGE, NUDGED = "@in", "@nudge", "@nudged"


class EngineGraph(NamedTuple):
    """A graph without gates."""

    model: ir.Model
    folder: Path  # of its weights
    # names of the residual stream after the parts that had gates, by ``(layer, part)``
    streams: dict[tuple[int, str], str]

    def inputs(self) -> dict[str, int]:
        """Names and ranks of the inputs."""
        return {str(value.name): len(value.shape or ()) for value in self.model.graph.inputs}

    def open(self, outputs: Sequence[str], num_threads: int) -> Any:
        """A session of ONNX Runtime that gives ``outputs``, over the engine's own weights."""
        import onnxruntime

        from specexport_runtime.bundle.files import native_path
        from specexport_runtime.executors.external_data import FOLDER_KEY, follow_links
        from specexport_runtime.executors.operators import register

        proto = ir.to_proto(self.model)
        del proto.graph.output[:]
        for name in outputs:
            proto.graph.output.add(name=name)
        options = onnxruntime.SessionOptions()
        register(options)
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry(FOLDER_KEY, native_path(follow_links(proto, self.folder)))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Tensors, outputs: Sequence[str], num_threads: int) -> Tensors:
        """Some tensors of the graph in a step."""
        return dict(zip(outputs, self.open(outputs, num_threads).run(list(outputs), feeds), strict=True))


def load_graph(path: Path) -> EngineGraph:
    """Read a graph, and put the branches that run in the place of their gates; BundleError if it cannot be read."""
    try:
        model = ir.load(path)
    except Exception as error:  # onnx raises protobuf's own types
        raise BundleError(f"{path} cannot be read as ONNX ({error}).", "build the bundle again.") from error
    graph, streams = model.graph, {}
    for node in [node for node in graph if node.op_type == "If" and str(node.name).startswith(_GATE)]:
        _, layer, *part = str(node.name).split(".")
        if part[-1] != "similarity":
            streams[int(layer), part[0]] = str(node.outputs[0].name)
            _inline(graph, node)
    for value in [value for value in graph.outputs if value.name == SIMILARITY.name]:
        graph.outputs.remove(value)
    remove_dead_nodes(model)
    gates = {spec.name for spec in GATE_INPUTS}
    for value in [value for value in graph.inputs if value.name in gates]:
        graph.inputs.remove(value)
    for name, weight in list(graph.initializers.items()):  # ONNX Runtime warns of each
        if not weight.uses():
            del graph.initializers[name]
    return EngineGraph(model, path.parent, streams)


def _inline(graph: ir.Graph, node: ir.Node) -> None:
    """Put the nodes of the branch that runs before ``node``, and drop it."""
    branch = node.attributes["then_branch"].as_graph()
    results = list(branch.outputs)
    nodes = list(branch)
    branch.outputs.clear()
    branch.remove(nodes)
    graph.insert_before(node, nodes)
    for old, new in zip(node.outputs, results, strict=True):
        name, old.name = old.name, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)


def values_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """What the nodes of the graph give, by name."""
    return {str(value.name): value for node in model.graph for value in node.outputs if value.name}


def cut_graph(source: EngineGraph, ranks: dict[str, int]) -> EngineGraph:
    """A copy in which the readers of some tensors, given with their ranks, read inputs ``…@in`` instead."""
    copy = source._replace(model=source.model.clone())
    graph, values = copy.model.graph, values_by_name(copy.model)
    for name, rank in ranks.items():
        fed = _new_input(graph, name + IN, values[name], rank)
        for use in list(values[name].uses()):
            use.node.replace_input_with(use.idx, fed)
    return copy


def nudge_graph(source: EngineGraph, ranks: dict[str, int], output: str) -> tuple[EngineGraph, str]:
    """A copy in which inputs ``…@nudge`` are added to the tensors in ``ranks``, and what ``output`` is called in it."""
    copy = source._replace(model=source.model.clone())
    graph, values = copy.model.graph, values_by_name(copy.model)
    for name, rank in ranks.items():
        value, emit = values[name], Emitter(graph)
        fed = _new_input(graph, name + NUDGE, value, rank)
        total = emit.op("Add", value, fed, dtype=ir.DataType.FLOAT, shape=value.shape)
        total.name = name + NUDGED
        readers = [(use.node, use.idx) for use in value.uses() if use.node is not emit.nodes[0]]
        emit.place(after=value.producer())
        for node, at in readers:
            node.replace_input_with(at, total)
    return copy, output + NUDGED if output in ranks else output


def _new_input(graph: ir.Graph, name: str, like: ir.Value, rank: int) -> ir.Value:
    value = ir.Value(name=name, type=like.type or ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None] * rank))
    graph.inputs.append(value)
    return value
