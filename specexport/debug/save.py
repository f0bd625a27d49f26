"""Two graphs and a step on disk, as polygraphy's command line takes them over."""

import shutil
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from specexport.atomic import new_folder
from specexport.debug.capture import CapturedStep
from specexport.debug.graph import EngineGraph
from specexport.debug.plain import with_plain_attention

MODEL, INPUTS = "model.onnx", "inputs.json"


def save_graphs(folder: Path, graphs: Mapping[str, tuple[EngineGraph, Seq[str]]], step: CapturedStep) -> None:
    """Write a subfolder for each graph: the model, a copy of its weights, and the inputs of the step.

    Args:
        folder: where to; must not be there yet.
        graphs: graphs and the tensors that they give, by the name of their subfolder.
        step: the step.

    Raises:
        OutputExistsError: the folder is in use.
        UserInputError: it cannot be written.
    """
    import onnx
    import onnx.inliner
    from polygraphy.backend.onnx import modify_outputs
    from polygraphy.json import save_json

    with new_folder(folder) as made:
        for name, (graph, outputs) in graphs.items():
            plain = graph._replace(model=with_plain_attention(graph.model, step.feeds))
            place, proto = made / name, modify_outputs(plain.to_proto(), outputs=list(outputs))
            place.mkdir()
            entries = [entry for tensor in proto.graph.initializer for entry in tensor.external_data]
            for location in {entry.value for entry in entries if entry.key == "location"}:
                shutil.copyfile(graph.folder / location, place / location)
            # graphsurgeon, by which polygraphy changes graphs, does not keep the types of model-local functions apart.
            onnx.save(onnx.inliner.inline_local_functions(proto), str(place / MODEL))
            save_json([step.feeds_of(plain.inputs())], str(place / INPUTS))
