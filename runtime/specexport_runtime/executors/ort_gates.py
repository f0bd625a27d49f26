"""Gates of an ONNX Runtime engine: which layers run, and whether attention similarity is measured."""

from pathlib import Path
from typing import Any

import numpy as np

from specexport_runtime.abi import LAYER_MASK, SIMILARITY, WANT_SIMILARITY, StepShape, TensorSpec
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import BoolArray, Executor, Float32Array

LAYER_ON = TensorSpec(
    "layer_on.{i}", "bool", (1,), "gate", "ort-cuda only, in host memory: element i of `layer_mask` as an input"
)


def is_gate(name: str) -> bool:
    """Whether an input of that name is a gate."""
    return name in (LAYER_MASK.name, WANT_SIMILARITY.name) or name.startswith(LAYER_ON.name.format(i=""))


class InputGatesMixin(Executor):
    """An executor whose engine has inputs for its gates, bound by pointer: any layers may be switched off.

    Setting them costs nothing, and no binding has to change. They are in host memory on a GPU too: ONNX Runtime decides
    there which branch of an ``If`` runs.
    """

    def open_gates(self, session: Any, where: Path, *, separate: bool = False) -> None:
        """Make the gates of ``num_gates``; with ``separate`` the graph has an input for each.

        IncompatibleError if the engine has others than the manifest says.
        """
        self._mask: BoolArray = np.ones(self.num_gates, np.bool_)
        self._measures: BoolArray = np.zeros(1, np.bool_)
        self._similarity: Float32Array = np.zeros((self.num_gates // 2, 0), np.float32)
        self._gates: dict[str, BoolArray] = {}
        if self.num_gates:
            parts = {LAYER_ON.name.format(i=i): self._mask[i : i + 1] for i in range(self.num_gates)}
            masks = parts if separate else {LAYER_MASK.name: self._mask}
            self._gates = {**masks, WANT_SIMILARITY.name: self._measures}
        sizes = {value.name: value.shape for value in session.get_inputs() if is_gate(value.name)}
        outputs = {value.name for value in session.get_outputs()}
        expected = {name: [len(array)] for name, array in self._gates.items()}
        if sizes != expected or (SIMILARITY.name in outputs) != bool(self.num_gates):
            raise IncompatibleError(
                f"{where}: the manifest says {self.num_gates} gates, and the engine has others.", "build it again."
            )

    def bind_gates(self, io: Any, shape: StepShape, measured: bool) -> Float32Array:
        """Bind the gates to a step; gives where its similarity goes, float32 [N, T], or [N, 0] if not ``measured``."""
        similarity = np.zeros((self.num_gates // 2, shape.num_tokens if measured else 0), np.float32)
        for name, array in self._gates.items():
            io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        if measured:  # an output that is not bound is not fetched
            io.bind_output(SIMILARITY.name, "cpu", 0, np.float32, similarity.shape, similarity.ctypes.data)
        return similarity

    def set_layers(self, mask: BoolArray | None) -> None:
        """See ``Executor.set_layers``."""
        self._mask[:] = True if mask is None else mask

    def measure_similarity(self, wanted: bool) -> None:
        """See ``Executor.measure_similarity``; holds for steps that are prepared from here on."""
        self._measures[0] = wanted

    @property
    def similarity(self) -> Float32Array:
        """Similarity [N, T] of the last step; [N, 0] if it was not measured."""
        return self._similarity.copy()
