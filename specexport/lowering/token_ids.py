"""The greedy choice in the graph: only token ids need to leave a GPU where no row is sampled."""

from typing import TYPE_CHECKING

from specexport.onnx_emit import Emitter
from specexport_runtime.abi import LOGITS, TOKEN_IDS

if TYPE_CHECKING:
    import onnx_ir as ir

_LARGE = 3.0e38  # below the largest float32; no sum of logits comes near it


def add_token_ids(ir_model: "ir.Model") -> None:
    """Add the output ``token_ids`` int64 [R]: argmax of each row of ``logits``, -1 for one that holds NaN or inf.

    The argmax of a row with NaN is anything, and reductions by maximum may skip NaN. A sum cannot hide one: it becomes
    NaN or infinite, and neither compares as small. Logits are float32 [R, V]; the model is changed in place.
    """
    import onnx_ir as ir

    logits = next(value for value in ir_model.graph.outputs if value.name == LOGITS.name)
    emit = Emitter(ir_model.graph, "greedy")
    best = emit.op("ArgMax", logits, axis=1, keepdims=0)
    total = emit.op("Abs", emit.op("ReduceSum", logits, emit.const([1]), keepdims=0))
    finite = emit.op("Less", total, emit.const(_LARGE, "float32"))
    chosen = emit.op("Where", finite, best, emit.const(-1))
    chosen.name = TOKEN_IDS.name
    chosen.shape = ir.Shape([None if logits.shape is None else logits.shape[0]])
    emit.place()
    ir_model.graph.outputs.append(chosen)
