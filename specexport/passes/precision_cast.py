"""Make precision explicit: weights and caches in the recipe's dtype, logits in float32."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, lazy_weight, part_of
from specexport.passes.base import CountingPass, find_constant, fold_readers_into, read_sizes
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import CheckFailedError, RecipeError

# By name: numpy itself has no bfloat16.
_MODEL_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


class PrecisionCastPass(CountingPass):
    """Decide dtypes once, at build time; counts the casts removed and added. RecipeError for an unknown ``dtype``.

    A weight that is cast to the model's dtype on every step is stored in it, lazily; logits get a Cast to float32, for
    sampling. Vectors that a model keeps in float32 on purpose (norms, rotary frequencies) are not touched.
    """

    name = "precision-cast"
    reason = "dtypes are decided by the recipe, not by what a checkpoint happened to be saved in"

    def __init__(self, dtype: str) -> None:
        if dtype not in _MODEL_DTYPES:
            raise RecipeError(f"models cannot have dtype {dtype!r}.", f"use one of {', '.join(_MODEL_DTYPES)}.")
        self.dtype = _MODEL_DTYPES[dtype]

    def rewrite(self, model: ir.Model) -> int:
        """Convert weights, cast logits; CheckFailedError if caches were traced in another dtype than the recipe's."""
        for value in model.graph.inputs:
            if value.shape is not None and len(value.shape) == 5 and value.dtype != self.dtype:
                raise CheckFailedError(f"{value.name} was traced in {value.dtype}, the recipe says {self.dtype}.")
        return self._convert_weights(model) + self._cast_logits(model)

    def _convert_weights(self, model: ir.Model) -> int:
        converted = 0
        for weight in list(model.graph.initializers.values()):
            tensor = find_constant(weight)
            readers = [use.node for use in weight.uses()]
            if tensor is None or tensor.dtype not in _FLOATS or not readers:
                continue
            if weight in model.graph.outputs or not all(self._casts_to_model(node) for node in readers):
                continue
            part = partial(_part, tensor, self.dtype)
            value = lazy_weight(model.graph, f"{weight.name}.cast", self.dtype, read_sizes(tensor), part=part)
            fold_readers_into(model, weight, readers, value)
            converted += len(readers)
        return converted

    def _casts_to_model(self, node: ir.Node) -> bool:
        return node.op_type == "Cast" and node.attributes.get_int("to", 0) == int(self.dtype)

    @staticmethod
    def _cast_logits(model: ir.Model) -> int:
        logits = next(value for value in model.graph.outputs if value.name == LOGITS.name)
        if logits.dtype == ir.DataType.FLOAT:
            return 0
        position = model.graph.outputs.index(logits)
        logits.name = f"{LOGITS.name}_model_dtype"
        emit = Emitter(model.graph)
        cast = emit.cast(logits, ir.DataType.FLOAT)
        cast.name, cast.shape = LOGITS.name, logits.shape
        emit.place()
        model.graph.outputs[position] = cast
        return 1


def _part(tensor: ir.TensorProtocol, dtype: ir.DataType, axis: int, start: int, stop: int) -> np.ndarray:
    return part_of(tensor, axis, start, stop).astype(dtype.numpy())
