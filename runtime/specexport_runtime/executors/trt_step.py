"""What a TensorRT executor keeps of each step shape it has met."""

import numpy as np

from specexport_runtime.abi import STEP_INPUTS, StepShape
from specexport_runtime.executors.base import Int32Array, StepBuffers
from specexport_runtime.executors.trt_memory import HostBlock, lay_out_inputs
from specexport_runtime.executors.trt_pack import Plan, Window


def make_buffers(shape: StepShape, feature_size: int = 0) -> StepBuffers:
    """Arrays of a step as it really is; ``feature_size`` is E of a draft head."""
    arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in STEP_INPUTS}
    features = np.zeros((shape.num_tokens, feature_size), np.float32) if feature_size else None
    return StepBuffers(**arrays, token_features=features)


class PlacedStep:
    """What is kept of one step shape: the arrays that the caller fills, and where they go."""

    def __init__(
        self,
        profile: int,  # number in the engine
        window: Window,  # in that profile
        block: HostBlock,  # for the engine's inputs
        names: tuple[str, ...],  # step inputs that the engine takes
        ends: Int32Array,  # of all cache rows, see ``fill_step``
        feature_size: int = 0,  # E of a draft head
    ) -> None:
        self.profile, self.window, self.block = profile, window, block
        self.ends = ends[window.shape.first_row :][: window.shape.num_seqs]
        # The engine's inputs in the block, and its bytes that are copied.
        self.tensors, self.num_bytes = lay_out_inputs(names, window.shape, feature_size)
        self.arrays = block.views(self.tensors)
        self.plans: dict[bytes, Plan] = {}  # by counts of new tokens and logit rows
        self.buffers: StepBuffers | None = None  # of the step as it really is
