"""Features of an ONNX Runtime engine: in host memory that is bound by pointer, or on the GPU beside its other tensors.

On a GPU they are computed in every step: no graph is recorded with a branch, and the cost is one matrix. Bringing them
to the host is what a step that does not want them is spared.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specexport_runtime.abi import FEATURES, NEXT_FEATURES, TOKEN_FEATURES, WANT_FEATURES, StepShape
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.executors.features import BoundFeatures, EngineFeatures


class OrtFeatures(EngineFeatures):
    """The features of one engine. Whether a target on a CPU computes them is bound by pointer, like a gate."""

    def __init__(self, session: Any, size: int, where: object, *, on_gpu: bool = False) -> None:
        own = {FEATURES.name, TOKEN_FEATURES.name, NEXT_FEATURES.name, WANT_FEATURES.name}
        values = (*session.get_inputs(), *session.get_outputs())
        shapes = {value.name: value.shape for value in values if value.name in own}
        super().__init__(shapes, size, where, gated=not on_gpu)
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

    def host_rows(self, num_tokens: int) -> Float32Array | None:
        """A new array for what a head on a GPU reads [T, E]; None for a target."""
        return np.zeros((num_tokens, self.size), np.float32) if self.reads else None

    def device_inputs(self, size: StepShape, make: Callable[[Any], Any]) -> dict[str, Any]:
        """What a head on a GPU reads, by name: a device value of the step's size, from ``make``."""
        rows = self.host_rows(size.num_tokens)
        return {} if rows is None else {TOKEN_FEATURES.name: make(rows)}

    def device_outputs(self, size: StepShape, make: Callable[[Any], Any]) -> dict[str, Any]:
        """What an engine on a GPU gives of features, likewise. Always bound: CUDA graphs keep addresses."""
        if self.output is None:
            return {}
        count = size.num_tokens if self.gives else size.num_logit_rows
        return {self.output: make(np.zeros((count, self.size), np.float32))}

    def fetch(self, outputs: Mapping[str, Any]) -> BoundFeatures:
        """What a step on a GPU gave, in host memory: all that a head hands on, and features that are wanted."""
        if self.gives:
            return BoundFeatures(given=outputs[FEATURES.name].numpy() if self.wanted else None)
        return BoundFeatures(handed_on=outputs[NEXT_FEATURES.name].numpy() if self.reads else None)
