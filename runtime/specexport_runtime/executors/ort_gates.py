"""Gates of an ONNX Runtime engine: which layers run, and whether attention similarity is measured."""

from pathlib import Path
from typing import Any

import numpy as np

from specexport_runtime.abi import GATE_INPUTS, SIMILARITY, StepShape
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import BoolArray, Float32Array


class OrtGates:
    """The gate inputs of one engine, bound by pointer: setting them costs nothing, and no binding has to change.

    Args:
        session: the ONNX Runtime session.
        num_gates: G of the graph; 0 for one without gates.
        where: names the graph in messages.

    Attributes:
        count: G.
        wanted: whether the next steps measure similarity.

    Raises:
        IncompatibleError: the graph's gates are not those that it is said to have.
    """

    def __init__(self, session: Any, num_gates: int, where: Path) -> None:
        self.count = num_gates
        self._mask: BoolArray = np.ones(num_gates, np.bool_)
        self._wanted: BoolArray = np.zeros(1, np.bool_)
        names = {spec.name for spec in GATE_INPUTS}
        sizes = {value.name: value.shape for value in session.get_inputs() if value.name in names}
        outputs = {value.name for value in session.get_outputs()}
        expected = {spec.name: [size] for spec, size in zip(GATE_INPUTS, (num_gates, 1), strict=True)}
        if sizes != (expected if num_gates else {}) or (SIMILARITY.name in outputs) != bool(num_gates):
            raise IncompatibleError(
                f"{where}: the manifest says {num_gates} gates, and the engine has others.", "build it again."
            )

    @property
    def wanted(self) -> bool:
        """Whether the next steps measure similarity."""
        return bool(self._wanted[0])

    def set_layers(self, mask: BoolArray | None) -> None:
        """See ``GatedExecutor.set_layers``."""
        self._mask[:] = True if mask is None else mask

    def want_similarity(self, wanted: bool) -> None:
        """See ``GatedExecutor.measure_similarity``."""
        self._wanted[0] = wanted

    def bind(self, io: Any, shape: StepShape, measured: bool) -> Float32Array:
        """Bind the gates to a step of ``shape``.

        Returns:
            where its similarity goes, float32 [N, T] or, if it is not measured, [N, 0].
        """
        similarity = np.zeros((self.count // 2, shape.num_tokens if measured else 0), np.float32)
        if self.count:
            for spec, array in zip(GATE_INPUTS, (self._mask, self._wanted), strict=True):
                io.bind_input(spec.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        if measured:  # an output that is not bound is not fetched
            io.bind_output(SIMILARITY.name, "cpu", 0, np.float32, similarity.shape, similarity.ctypes.data)
        return similarity
