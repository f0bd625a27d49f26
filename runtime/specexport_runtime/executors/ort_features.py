"""Features of an ONNX Runtime engine on a CPU, in host memory that is bound by pointer."""

from typing import Any

import numpy as np

from specexport_runtime.abi import FEATURES, NEXT_FEATURES, TOKEN_FEATURES, WANT_FEATURES, StepShape
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.executors.features import BoundFeatures, EngineFeatures


class OrtFeatures(EngineFeatures):
    """The features of one engine. Whether a target computes them is bound by pointer, like a gate."""

    def __init__(self, session: Any, size: int, where: object) -> None:
        super().__init__(feature_shapes(session), size, where, gated=True)
        # One array for all bindings, as for logits: prompts come in chunks of many sizes.
        self._rows: Float32Array = np.empty((0, size), np.float32)

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens has room; if not, room is made, and older bindings are stale."""
        if not self.size or num_tokens <= len(self._rows):
            return True
        self._rows = np.empty((num_tokens, self.size), np.float32)
        return False

    def bind(self, io: Any, shape: StepShape, wanted: bool) -> BoundFeatures:
        """Bind what the engine has of features to a step of ``shape``; give it room with :meth:`fits` before."""
        rows = self._rows[: shape.num_tokens]
        if self.gives:
            io.bind_input(WANT_FEATURES.name, "cpu", 0, np.bool_, (1,), self._wanted.ctypes.data)
            if not wanted:
                return BoundFeatures()
            io.bind_output(FEATURES.name, "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            return BoundFeatures(given=rows)
        if not self.reads:
            return BoundFeatures()
        handed = np.zeros((shape.num_logit_rows, self.size), np.float32)
        io.bind_input(TOKEN_FEATURES.name, "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
        io.bind_output(NEXT_FEATURES.name, "cpu", 0, np.float32, handed.shape, handed.ctypes.data)
        return BoundFeatures(read=rows, handed_on=handed)


def feature_shapes(session: Any) -> dict[str, Any]:
    """Sizes of the inputs and outputs of a session that have to do with features, by name."""
    own = {FEATURES.name, TOKEN_FEATURES.name, NEXT_FEATURES.name, WANT_FEATURES.name}
    return {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs()) if value.name in own}
