"""From a lowered ``onnx_ir`` model to a proof engine's graph, and the graphs that the repository keeps.

    python -m tools.proof.export               # write them all anew: about ten minutes, 8 GB of memory
    python -m tools.proof.export tiny small

Needs the export stack. A test writes the tiny ones anew and compares.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tools.proof.checkpoints import ensure_pair
from tools.proof.graph import FOLDER, Array, Graph, Node, Tensor, to_json
from tools.proof.models import PLANS, kv_capacity

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_CONSTANT = 256
"""Elements of the largest initializer that is kept in the graph."""


def to_graph(ir_model: "ir.Model") -> tuple[Graph, dict[str, Array]]:
    """A lowered model's graph, and its weights by initializer."""
    import onnx_ir as ir

    constants: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    for name, value in ir_model.graph.initializers.items():
        array = ir.convenience.get_const_tensor(value).numpy()  # type: ignore[union-attr]  # it has one
        (constants if array.size <= MAX_CONSTANT and "norm" not in name else weights)[name] = array
    nodes = [_to_node(node) for node in ir_model.graph]
    inputs, outputs = (
        tuple(_to_tensor(value) for value in values) for values in (ir_model.graph.inputs, ir_model.graph.outputs)
    )
    return Graph(inputs, outputs, tuple(nodes), constants, dict.fromkeys(weights, "")), weights


def _to_tensor(value: "ir.Value") -> Tensor:
    if value.shape is None or value.dtype is None:
        raise ValueError(f"{value.name} has no type or shape.")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return Tensor(str(value.name), str(value.dtype.numpy()), shape)


def _to_node(node: "ir.Node") -> Node:
    attributes = {
        name: list(item.value) if isinstance(item.value, (tuple, list)) else item.value
        for name, item in node.attributes.items()
        if not name.startswith("plugin_") and name != "aot"
    }
    inputs, outputs = (
        tuple("" if value is None else str(value.name) for value in values) for values in (node.inputs, node.outputs)
    )
    return Node(node.op_type, inputs, outputs, attributes)


def name_weights(graph: Graph, weights: Mapping[str, Array], tensors: Mapping[str, Array]) -> Graph:
    """Say which tensor of a checkpoint each weight is: the one of its name, or else the one that is equal.

    ValueError: there is none; the passes have made a new weight.
    """
    found = {}
    for name, array in weights.items():
        same = name.removeprefix("model.")
        if same not in tensors:
            same = next((key for key, tensor in tensors.items() if np.array_equal(tensor, array)), "")
        if not same or not np.array_equal(tensors[same], array):
            raise ValueError(f"{name} {array.shape} is no tensor of the checkpoint.")
        found[name] = same
    return graph._replace(weights=found)


def lower_checkpoint(checkpoint: Path, capacity: int) -> "ir.Model":
    """A checkpoint as a build for ``tensorrt`` lowers it, float16, lowering ``plugin``."""
    from specexport.checkpoint.load import load_checkpoint
    from specexport.lowering.common import unify_norm_types
    from specexport.lowering.trt_plugin import lower_trt_plugin
    from specexport.passes.linear_flatten import LinearFlattenPass
    from specexport.passes.pipeline import default_passes, run_passes
    from specexport.trace.check import trace_checkpoint

    model = trace_checkpoint(load_checkpoint(str(checkpoint), dtype="float16")).ir_model
    run_passes(model, default_passes("float16"))
    LinearFlattenPass()(model)
    unify_norm_types(model)
    lower_trt_plugin(model, kv_capacity=capacity)
    return model


def export_role(model: str, role: str, work: Path) -> str:
    """JSON of the graph of one model of a pair of ``PLANS``; ``work`` is the folder for checkpoints."""
    from safetensors.numpy import load_file

    plan = PLANS[model]
    target, draft = ensure_pair(work, model, decisive=plan.is_decisive)
    folder = target if role == "target" else draft
    graph, weights = to_graph(lower_checkpoint(folder, kv_capacity(plan)))
    return to_json(name_weights(graph, weights, load_file(folder / "model.safetensors")))


def main(arguments: Sequence[str]) -> None:
    """Write the graphs of the named models."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for model in arguments or tuple(PLANS):
            for role in ("target", "draft"):
                text = export_role(model, role, Path(work))
                (FOLDER / f"{model}-{role}.json").write_text(text, encoding="utf-8")
                print(f"{model}-{role}.json: {len(text)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
