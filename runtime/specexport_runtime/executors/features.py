"""Features of an engine, whatever runs it: what a target gives to a draft head, and what a head reads and hands on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specexport_runtime.abi import FEATURES, NEXT_FEATURES, TOKEN_FEATURES, WANT_FEATURES
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import BoolArray, Executor, Float32Array

_WIDE = (FEATURES.name, TOKEN_FEATURES.name, NEXT_FEATURES.name)


class BoundFeatures(NamedTuple):
    """Where the features of one step are; None where the engine has none of that kind, or none are wanted."""

    given: Float32Array | None = None  # of a target [T, E]
    read: Float32Array | None = None  # of a head, to be filled [T, E]
    handed_on: Float32Array | None = None  # of a head [R, E]


class EngineFeatures:
    """What one engine has of features, E a token or 0, checked against its manifest (IncompatibleError)."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int | str | None]], size: int, where: object, *, gated: bool
    ) -> None:
        self.size = size
        # A target gives features, a draft head reads them.
        self.gives, self.reads = FEATURES.name in shapes, TOKEN_FEATURES.name in shapes
        widths = {shapes[name][-1] for name in _WIDE if name in shapes}
        pairs = {WANT_FEATURES.name: self.gives and gated, NEXT_FEATURES.name: self.reads}
        if widths != ({size} if size else set()) or any((name in shapes) != has for name, has in pairs.items()):
            raise IncompatibleError(
                f"{where}: the manifest says features of {size} values, and the engine has others.", "build it again."
            )
        self._wanted: BoolArray = np.zeros(1, np.bool_)

    @property
    def wanted(self) -> bool:
        """Whether the next steps compute features, or bring them to the host."""
        return bool(self._wanted[0])

    def want(self, wanted: bool) -> None:
        """See ``Executor.want_features``."""
        self._wanted[0] = wanted

    @property
    def output(self) -> str | None:
        """The output that has features; None where there is none."""
        return FEATURES.name if self.gives else NEXT_FEATURES.name if self.reads else None


class FeaturesMixin(Executor):
    """An executor of whatever engine: its features are those that the engine has."""

    _features: EngineFeatures
    _bound: BoundFeatures = BoundFeatures()
    """Of the last step."""

    def _set_feature_traits(self, features: EngineFeatures) -> None:
        """Say what the engine has of features."""
        self.feature_size, self.gives_features, self.reads_features = features.size, features.gives, features.reads

    def want_features(self, wanted: bool) -> None:
        """Holds for steps that are prepared from here on."""
        self._features.want(wanted)

    @property
    def features(self) -> Float32Array:
        """Features [T, E] of the last step; [0, E] if they were not wanted."""
        given = self._bound.given
        return super().features if given is None else given

    @property
    def next_features(self) -> Float32Array:
        """What the last step handed on [R, E]; [0, E] of an engine that hands nothing on."""
        handed = self._bound.handed_on
        return super().next_features if handed is None else handed
