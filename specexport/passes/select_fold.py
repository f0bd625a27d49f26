"""Store weights that a graph reads one at a time as separate weights."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import lazy_weight, part_of
from specexport.passes.base import CountingPass, constant_of, sizes_of


class SelectFoldPass(CountingPass):
    """Fold Gather nodes that take one fixed entry of a stack of weights: experts that a module loops over.

    What is behind them is then a linear layer like others. A stack that is also read in another way is left alone.
    Entries are lazy, and a stack is never copied whole. Counts the Gathers folded.
    """

    name = "select-fold"
    reason = "a layer taken out of a stack of weights is packed and multiplied like any other"

    def rewrite(self, model: ir.Model) -> int:
        """Fold the readers of every such stack."""
        folded = 0
        for weight in list(model.graph.initializers.values()):
            tensor = constant_of(weight)
            readers = [use.node for use in weight.uses()]
            chosen = [_entry(node, weight) for node in readers]
            if not readers or tensor is None or len(tensor.shape) != 3 or None in chosen:
                continue
            for node, entry in zip(readers, chosen, strict=True):
                self._fold(model, node, tensor, int(entry or 0))
            del model.graph.initializers[str(weight.name)]
            folded += len(readers)
        return folded

    @staticmethod
    def _fold(model: ir.Model, node: ir.Node, tensor: ir.TensorProtocol, entry: int) -> None:
        count, *shape = sizes_of(tensor)
        make, part = partial(_one, tensor, entry % count), partial(_part, tensor, entry % count)
        value = lazy_weight(model.graph, f"{tensor.name}.{entry % count}", tensor.dtype, shape, make, part)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        model.graph.remove(node, safe=True)


def _entry(node: ir.Node, weight: ir.Value) -> int | None:
    """Which entry along the first axis a node takes; None if it does something else."""
    if node.op_type != "Gather" or node.domain != "" or node.inputs[0] is not weight:
        return None
    index = constant_of(node.inputs[1])
    if index is None or index.shape.rank() or node.attributes.get_int("axis", 0) or node.outputs[0].is_graph_output():
        return None
    return int(index.numpy())


def _one(tensor: ir.TensorProtocol, entry: int) -> np.ndarray:
    found: np.ndarray = part_of(tensor, 0, entry, entry + 1)[0]
    return found


def _part(tensor: ir.TensorProtocol, entry: int, axis: int, start: int, stop: int) -> np.ndarray:
    where = slice(start, stop)
    return _one(tensor, entry)[where if axis == 0 else (slice(None), where)]
