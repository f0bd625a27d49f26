"""Two graphs and a step on disk, as polygraphy's command line takes them over."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from specexport.atomic import new_folder
from specexport.debug.capture import CapturedStep
from specexport.debug.graph import EngineGraph, values_by_name
from specexport.debug.plain import with_plain_operators
from specexport.lowering.fuse import remove_dead_nodes

MODEL, WEIGHTS, INPUTS = "model.onnx", "model.onnx.data", "inputs.json"


def save_graphs(folder: Path, graphs: Mapping[str, tuple[EngineGraph, Seq[str]]], step: CapturedStep) -> None:
    """Write a subfolder for each graph: the model and its weights in standard operators, and the inputs of the step.

    ``graphs`` holds graphs and the tensors that they give, by the name of their subfolder. Raises OutputExistsError if
    ``folder`` exists, UserInputError if it cannot be written.
    """
    import onnx_ir as ir
    import onnx_ir.passes.common as common_passes
    from polygraphy.json import save_json

    with new_folder(folder) as made:
        for name, (graph, outputs) in graphs.items():
            plain = graph._replace(model=with_plain_operators(graph.model, step.feeds))
            values = values_by_name(plain.model)
            plain.model.graph.outputs[:] = [values[output] for output in outputs]
            remove_dead_nodes(plain.model)
            common_passes.RemoveUnusedNodesPass()(plain.model)
            common_passes.InlinePass()(plain.model)  # polygraphy's graph surgery does not keep functions apart
            place = made / name
            place.mkdir()
            ir.save(plain.model, place / MODEL, external_data=WEIGHTS)
            save_json([step.feeds_of(plain.inputs())], str(place / INPUTS))
