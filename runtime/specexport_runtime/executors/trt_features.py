"""Features of a TensorRT engine: their place on the device, and the pinned memory that they are copied to.

A target computes features in every step, and they are copied where they are wanted. A head's are always: its next step
reads them.
"""

from collections.abc import Sequence as Seq

from specexport_runtime.abi import TOKEN_FEATURES, StepShape
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors.features import BoundFeatures, EngineFeatures
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.trt_engine import EngineTensor
from specexport_runtime.executors.trt_memory import HostOutput
from specexport_runtime.executors.trt_pack import Plan


class TrtFeatures(EngineFeatures):
    """The features of one engine; at ``address`` and in ``host`` is room for the largest step."""

    def __init__(
        self, tensors: Seq[EngineTensor], size: int, where: str, driver: GpuDriver, address: int, host: HostOutput
    ) -> None:
        super().__init__({tensor.name: tensor.shape for tensor in tensors}, size, where, gated=False)
        self.address = address
        self._driver, self._host = driver, host

    def copy_out(self, shape: StepShape) -> None:
        """Put the copy of a step's features on the stream, if they are needed; ``shape`` is the step in the engine."""
        if self.reads or (self.gives and self.wanted):
            self._host.open()
            rows = shape.num_tokens if self.gives else shape.num_logit_rows
            self._driver.copy_out(self._host.address, self.address, rows * self._host.row_bytes)

    def bound(self, plan: Plan, num_logit_rows: int) -> BoundFeatures:
        """What was copied of a step that is done, without the rows of dummies: R is that of the step before padding."""
        if self.reads:
            return BoundFeatures(handed_on=self._host.array[:num_logit_rows])
        return BoundFeatures(given=self._host.array[plan.tokens] if self.gives and self.wanted else None)


def feature_rows(entry: ModelEntry, profiles: Seq[Profile]) -> int:
    """Most features that a step of an engine gives: one for each token, or for each row of logits of a head."""
    if not entry.engine.feature_size:
        return 0
    reads = TOKEN_FEATURES.name in entry.engine.inputs
    return max(profile.num_logit_rows if reads else profile.num_tokens for profile in profiles)
