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


class OrtGates:
    """The gate inputs of one engine, bound by pointer: setting them costs nothing, and no binding has to change.

    They are in host memory on a GPU too: ONNX Runtime decides there which branch of an ``If`` runs. With ``separate``
    the graph has an input for each gate. IncompatibleError if its gates are not the ``num_gates`` of the manifest.
    """

    def __init__(self, session: Any, num_gates: int, where: Path, *, separate: bool = False) -> None:
        self.count = num_gates  # G
        self._mask: BoolArray = np.ones(num_gates, np.bool_)
        self._wanted: BoolArray = np.zeros(1, np.bool_)
        self._inputs: dict[str, BoolArray] = {}
        if num_gates:
            parts = {LAYER_ON.name.format(i=i): self._mask[i : i + 1] for i in range(num_gates)}
            masks = parts if separate else {LAYER_MASK.name: self._mask}
            self._inputs = {**masks, WANT_SIMILARITY.name: self._wanted}
        sizes = {value.name: value.shape for value in session.get_inputs() if is_gate(value.name)}
        outputs = {value.name for value in session.get_outputs()}
        expected = {name: [len(array)] for name, array in self._inputs.items()}
        if sizes != expected or (SIMILARITY.name in outputs) != bool(num_gates):
            raise IncompatibleError(
                f"{where}: the manifest says {num_gates} gates, and the engine has others.", "build it again."
            )

    @property
    def wanted(self) -> bool:
        """Whether the next steps measure similarity."""
        return bool(self._wanted[0])

    def set_layers(self, mask: BoolArray | None) -> None:
        """See ``Executor.set_layers``."""
        self._mask[:] = True if mask is None else mask

    def want_similarity(self, wanted: bool) -> None:
        """See ``Executor.measure_similarity``."""
        self._wanted[0] = wanted

    def bind(self, io: Any, shape: StepShape, measured: bool) -> Float32Array:
        """Bind the gates to a step; gives where its similarity goes, float32 [N, T], or [N, 0] if not ``measured``."""
        similarity = np.zeros((self.count // 2, shape.num_tokens if measured else 0), np.float32)
        for name, array in self._inputs.items():
            io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        if measured:  # an output that is not bound is not fetched
            io.bind_output(SIMILARITY.name, "cpu", 0, np.float32, similarity.shape, similarity.ctypes.data)
        return similarity


def is_gate(name: str) -> bool:
    """Whether an input of that name is a gate."""
    return name in (LAYER_MASK.name, WANT_SIMILARITY.name) or name.startswith(LAYER_ON.name.format(i=""))


class GatedByInputs(Executor):
    """An executor whose engine has inputs for its gates: any layers may be switched off."""

    _gates: OrtGates
    _similarity: Float32Array

    def set_layers(self, mask: BoolArray | None) -> None:
        """See ``Executor.set_layers``."""
        self._gates.set_layers(mask)

    def measure_similarity(self, wanted: bool) -> None:
        """See ``Executor.measure_similarity``; holds for steps that are prepared from here on."""
        self._gates.want_similarity(wanted)

    @property
    def similarity(self) -> Float32Array:
        """Similarity [N, T] of the last step; [N, 0] if it was not measured."""
        return self._similarity.copy()
