"""How much memory a GPU build and its engines need, told before the build and refused when it cannot fit."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from specexport.backends.profiles import kv_bytes
from specexport_runtime.abi import ITEM_BYTES, LayerGeometry
from specexport_runtime.errors import IncompatibleError

BUILD_FACTOR = 3.5
"""Host memory at the builder's peak, in sizes of the model's weights (docs/gpu.md has the measurement)."""
BUILD_BASE_BYTES = 700 * 10**6
"""Host memory of the builder and the compiler without any model."""


class MemoryPlan(NamedTuple):
    """Bytes that one model needs."""

    host: int  # host memory, at the peak of the build
    disk: int  # at the peak: the graph, and one engine for each architecture
    gpu_weights: int  # GPU memory for weights, when the engine runs
    gpu_kv: int  # GPU memory for the KV caches of all rows

    def describe(self) -> str:
        """One line for people."""
        return (
            f"needs {self.host / 1e9:.1f} GB of memory and {self.disk / 1e9:.1f} GB of disk to build; "
            f"on the GPU {self.gpu_weights / 1e9:.2f} GB of weights and {self.gpu_kv / 1e9:.2f} GB of KV cache"
        )


def plan_memory(
    *,
    num_parameters: int,
    dtype: str,  # of weights and caches
    layers: Seq[LayerGeometry],
    kv_capacity: int,  # L
    max_num_seqs: int,  # cache rows
    num_engines: int,  # one for each architecture
) -> MemoryPlan:
    """What building and running one model needs."""
    item = ITEM_BYTES[dtype]
    weights = num_parameters * item
    return MemoryPlan(
        host=int(weights * BUILD_FACTOR) + BUILD_BASE_BYTES,
        disk=int(weights * (1 + num_engines) * 1.05),
        gpu_weights=weights,
        gpu_kv=kv_bytes(layers, kv_capacity, max_num_seqs, item),
    )


def require_host_memory(plan: MemoryPlan, available: int) -> None:
    """Refuse a build that needs more than the ``available`` bytes (0: unknown): IncompatibleError names both."""
    if 0 < available < plan.host:
        raise IncompatibleError(
            f"building needs about {plan.host / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free here.",
            "close other programs, or build on a machine with more memory: no GPU is needed for tensorrt-rtx.",
        )


def require_gpu_memory(plans: Seq[MemoryPlan], activations: int, gpu_memory_gb: float) -> None:
    """Refuse engines that their GPU cannot hold: IncompatibleError names what is needed, and what to lower.

    ``plans`` has one for each model of the bundle; ``activations`` are bytes of all engines, 0 before they are built.
    """
    weights, caches = sum(plan.gpu_weights for plan in plans), sum(plan.gpu_kv for plan in plans)
    needed = weights + caches + activations
    if needed > gpu_memory_gb * 1e9:
        raise IncompatibleError(
            f"the engines need {needed / 1e9:.2f} GB of GPU memory (weights {weights / 1e9:.2f}, KV caches "
            f"{caches / 1e9:.2f}, activations {activations / 1e9:.2f}), and --gpu-memory-gb is {gpu_memory_gb:g}.",
            "lower --max-num-seqs, --max-model-len or --max-num-tokens, or use a smaller model.",
        )
