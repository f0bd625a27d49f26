"""Make precision explicit: weights in the recipe's dtype, logits in float32."""

import numpy as np
import onnx_ir as ir

from specexport.passes.base import CountingPass
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import CheckFailedError


class PrecisionCastPass(CountingPass):
    """Bring every weight matrix to the model's dtype and the logits to float32.

    1. A matrix of another float dtype is converted, lazily, when the engine is written. Vectors that the model
       itself keeps in float32 (norms, rotary frequencies) stay: their graph casts around them.
    2. Logits that are not float32 get a Cast, because sampling is defined on float32.

    Counts converted weights and added casts.

    Args:
        dtype: numpy name of the dtype of weights, activations and caches.
    """

    name = "precision-cast"
    reason = "dtypes are decided by the recipe, not by what a checkpoint happened to be saved in"

    def __init__(self, dtype: str) -> None:
        self.dtype = ir.DataType.from_numpy(np.dtype(dtype))

    def rewrite(self, model: ir.Model) -> int:
        """Convert weights, cast logits.

        Raises:
            CheckFailedError: the caches were traced in another dtype than the recipe's.
        """
        for value in model.graph.inputs:
            if value.shape is not None and len(value.shape) == 5 and value.dtype != self.dtype:
                raise CheckFailedError(f"{value.name} was traced in {value.dtype}, the recipe says {self.dtype}.")
        return self._cast_logits(model)

    def _cast_logits(self, model: ir.Model) -> int:
        logits = next(value for value in model.graph.outputs if value.name == LOGITS.name)
        if logits.dtype == ir.DataType.FLOAT:
            return 0
        position = model.graph.outputs.index(logits)
        logits.name = f"{LOGITS.name}_model_dtype"
        cast = ir.node("Cast", [logits], attributes={"to": int(ir.DataType.FLOAT)})
        cast.outputs[0].name = LOGITS.name
        cast.outputs[0].dtype = ir.DataType.FLOAT
        cast.outputs[0].shape = logits.shape
        model.graph.append(cast)
        model.graph.outputs[position] = cast.outputs[0]
        return 1
