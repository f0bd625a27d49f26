"""Only the selected rows reach the LM head, as a matrix, with the weight as it is stored."""

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, constant
from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import CountingPass, find_constant
from specexport_runtime.abi import LOGIT_ROWS, LOGITS

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Clip", "Identity"}
_SWAP = (1, 0, 2)


class _Head(NamedTuple):
    """The matched tail of the graph."""

    hidden: ir.Value  # [1, T, H], before the selection
    selected: ir.Value  # [1, R, H], after it
    # nodes from ``selected`` to the logits, in order; one of them is ``matmul``, the last ``squeeze``
    chain: list[ir.Node]
    matmul: ir.Node  # the LM head
    squeeze: ir.Node  # drops the batch axis, giving [R, V]


class LogitRowSelectPass(CountingPass):
    """Select rows of a matrix [T, H] by one Gather, and multiply them by the LM head in one Gemm.

    The trace copies all T rows to select some, and all R*V logits to cut the batch axis. Here hidden [1, T, H] is
    gathered to [R, H] and multiplied by W [V, H] as stored, so that a tied embedding is one weight; elementwise nodes
    after it carry on with [R, V]. A tail of another form is correct as traced, and stays. Counts 1 if it matched.
    """

    name = "logit-row-select"
    reason = "the LM head is the largest weight of a small model: it must see no row in vain and be stored once"

    def rewrite(self, model: ir.Model) -> int:
        """Rewrite the tail if it has the expected form."""
        head = _match(model)
        if head is None:
            return 0
        graph = model.graph
        axis = constant(graph, "logit_row_batch_axis", np.array([0], np.int64))
        width = head.hidden.shape[2]  # type: ignore[index]
        rows_in = next(value for value in graph.inputs if value.name == LOGIT_ROWS.name)
        emit = Emitter(graph)
        tokens = emit.op("Squeeze", head.hidden, axis, shape=[DIM_NAMES["T"], width])
        rows = emit.op("Gather", tokens, rows_in, axis=0, shape=[DIM_NAMES["R"], width])
        emit.place(before=head.chain[0])
        head.chain[0].replace_input_with(_index(head.chain[0], head.selected), rows)
        gemm = _gemm(emit, head.matmul)
        emit.place(before=head.matmul)
        self._shorten(graph, head, gemm)
        return 1

    @staticmethod
    def _shorten(graph: ir.Graph, head: _Head, gemm: ir.Value) -> None:
        """Put the Gemm in the MatMul's place and let the last node before the cut give the logits."""
        ir.convenience.replace_all_uses_with(head.matmul.outputs[0], gemm)
        chain = [gemm if node is head.matmul else node.outputs[0] for node in head.chain[:-1]]
        for value in chain:
            if value.shape is not None and len(value.shape) == 3:
                value.shape = ir.Shape(list(value.shape)[1:])
        logits, last = head.squeeze.outputs[0], chain[-1]
        graph.outputs[graph.outputs.index(logits)] = last
        shape, dtype = logits.shape, logits.dtype
        graph.remove([head.squeeze, head.matmul], safe=True)  # safe: also gives back their inputs
        logits.name = None
        last.name, last.shape = LOGITS.name, shape
        last.type = ir.TensorType(dtype) if dtype is not None else None


def _gemm(emit: Emitter, matmul: ir.Node) -> ir.Value:
    rows, weight = matmul.inputs
    assert rows is not None and weight is not None  # noqa: PT018, S101 - a MatMul has both
    transposed = weight.producer()
    stored = transposed.inputs[0] if transposed is not None else weight
    attributes: dict[str, Any] = {"transB": 1} if transposed is not None else {}
    out = matmul.outputs[0]
    return emit.op("Gemm", rows, stored, dtype=out.dtype, shape=[DIM_NAMES["R"], out.shape[2]], **attributes)  # type: ignore[index]


def _index(node: ir.Node, value: ir.Value) -> int:
    return next(i for i, x in enumerate(node.inputs) if x is value)


def _match(model: ir.Model) -> _Head | None:
    selection = _match_selection(model)
    if selection is None:
        return None
    hidden, selected = selection
    chain, matmul, value = [], None, selected
    while True:
        readers = [use.node for use in value.uses()]
        if len(readers) != 1 or value in model.graph.outputs:
            return None
        node = readers[0]
        chain.append(node)
        if _is_batch_removal(node):
            return _Head(hidden, selected, chain, matmul, node) if matmul is not None else None
        if matmul is None and node.op_type == "MatMul" and node.inputs[0] is value and _is_weight(node.inputs[1]):
            matmul = node
        elif node.op_type not in _ELEMENTWISE or not all(x is value or _can_broadcast(x) for x in node.inputs):
            return None
        value = node.outputs[0]


def _match_selection(model: ir.Model) -> tuple[ir.Value, ir.Value] | None:
    """Values ``hidden`` [1, T, H] and ``selected`` [1, R, H] around Transpose, GatherND(logit_rows), Transpose."""
    rows = next(value for value in model.graph.inputs if value.name == LOGIT_ROWS.name)
    readers = [use.node for use in rows.uses()]
    if len(readers) != 1 or readers[0].op_type != "Unsqueeze":
        return None
    gather = _find_only_reader(readers[0].outputs[0], "GatherND")
    back = _find_only_reader(gather.outputs[0], "Transpose") if gather is not None else None
    there = gather.inputs[0].producer() if gather is not None and gather.inputs[0] is not None else None
    if back is None or there is None or there.op_type != "Transpose" or there.inputs[0] is None:
        return None
    if any(tuple(node.attributes["perm"].as_ints()) != _SWAP for node in (there, back)):
        return None
    return there.inputs[0], back.outputs[0]


def _find_only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _is_weight(value: ir.Value | None) -> bool:
    """A constant matrix, or the Transpose of one."""
    producer = None if value is None else value.producer()
    if producer is not None:
        value = producer.inputs[0] if producer.op_type == "Transpose" else None
    tensor = find_constant(value)
    return tensor is not None and len(tensor.shape) == 2


def _can_broadcast(value: ir.Value | None) -> bool:
    """A constant that means the same beside [1, R, V] and beside [R, V]: a scalar or a vector."""
    tensor = find_constant(value)
    return value is None or (tensor is not None and len(tensor.shape) <= 1)


def _is_batch_removal(node: ir.Node) -> bool:
    """``x[0]`` of the trace: Gather of index 0 on axis 0."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    index = find_constant(node.inputs[1])
    return index is not None and len(index.shape) == 0 and int(index.numpy()) == 0
