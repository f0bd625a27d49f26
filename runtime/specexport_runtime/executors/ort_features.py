"""Features of an ONNX Runtime engine: what a target gives to a draft head, and what a head reads and hands on."""

from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.abi import FEATURES, NEXT_FEATURES, TOKEN_FEATURES, WANT_FEATURES, StepShape
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import BoolArray, Float32Array


class BoundFeatures(NamedTuple):
    """Where the features of one step shape are; None where the engine has none of that kind, or none are wanted.

    Attributes:
        given: of a target [T, E].
        read: of a head, to be filled [T, E].
        handed_on: of a head [R, E].
    """

    given: Float32Array | None = None
    read: Float32Array | None = None
    handed_on: Float32Array | None = None


class OrtFeatures:
    """The features of one engine. Whether a target computes them is bound by pointer, like a gate.

    Args:
        session: the ONNX Runtime session.
        size: E; 0 for an engine without features.
        where: names the graph in messages.

    Attributes:
        size: E.
        gives: whether this is a target that gives features.
        reads: whether this is a draft head.

    Raises:
        IncompatibleError: the graph has no features, or others than it is said to have.
    """

    def __init__(self, session: Any, size: int, where: object) -> None:
        shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
        self.size = size
        self.gives, self.reads = FEATURES.name in shapes, TOKEN_FEATURES.name in shapes
        widths = {
            shapes[name][-1] for name in (FEATURES.name, TOKEN_FEATURES.name, NEXT_FEATURES.name) if name in shapes
        }
        pairs = {WANT_FEATURES.name: self.gives, NEXT_FEATURES.name: self.reads}
        if widths != ({size} if size else set()) or any((name in shapes) != has for name, has in pairs.items()):
            raise IncompatibleError(
                f"{where}: the manifest says features of {size} values, and the engine has others.", "build it again."
            )
        self._wanted: BoolArray = np.zeros(1, np.bool_)
        # One array for all bindings, as for logits: prompts come in chunks of many sizes.
        self._rows: Float32Array = np.empty((0, size), np.float32)

    @property
    def wanted(self) -> bool:
        """Whether the next steps compute features."""
        return bool(self._wanted[0])

    def want(self, wanted: bool) -> None:
        """See ``FeaturedExecutor.want_features``."""
        self._wanted[0] = wanted

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
