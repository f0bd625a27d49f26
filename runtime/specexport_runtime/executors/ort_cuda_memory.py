"""Memory of the steps of one ``ort-cuda`` executor: on the device one buffer for inputs and one for each output.

Steps of all sizes have the same buffers, which are as large as the largest step so far. Steps that wait for none before
them have pinned memory each.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from specexport_runtime.abi import StepShape
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.gpu_memory import HostBlock, HostOutput, InputTensor

INPUTS = "inputs"
_MAX_VIEWS = 256


class StepLayout(NamedTuple):
    """What the steps of one size have in memory."""

    inputs: tuple[InputTensor, ...]
    sizes: Mapping[str, int]  # bytes of each buffer: ``INPUTS``, and outputs by name
    ids: int  # where the input ids begin among the inputs


class StepMemory:
    """The buffers on the device. One that becomes too small moves."""

    def __init__(self, driver: GpuDriver, where: object) -> None:
        self.addresses: dict[str, int] = {}
        self._driver, self._where = driver, where
        self._sizes: dict[str, int] = {}
        self._left: list[int] = []  # what moved, where graphs have its address

    def needs_growth(self, wanted: Mapping[str, int]) -> bool:
        """Whether a buffer is smaller than ``wanted``, in bytes by name."""
        return any(num_bytes > self._sizes.get(name, 0) for name, num_bytes in wanted.items())

    def grow(self, wanted: Mapping[str, int], *, keeps: bool) -> None:
        """Make room; IncompatibleError if the GPU has none. With ``keeps``, graphs go on with what was there before."""
        self._driver.synchronize()  # a step may still run
        for name, num_bytes in wanted.items():
            if num_bytes <= self._sizes.get(name, 0):
                continue
            if name in self.addresses:
                self._left.append(self.addresses.pop(name))
                del self._sizes[name]
            if not keeps:
                self._free_outgrown()
            self.addresses[name] = self._driver.allocate(num_bytes, f"{self._where}: {name} of a step")
            self._sizes[name] = num_bytes

    def _free_outgrown(self) -> None:
        while self._left:
            self._driver.free(self._left.pop())

    def close(self) -> None:
        """Give all of it back."""
        self._left += self.addresses.values()
        self.addresses.clear()
        self._sizes.clear()
        self._free_outgrown()


class HostStep:
    """What one step has in pinned memory from when it is put on the device until it is done."""

    def __init__(self, driver: GpuDriver) -> None:
        self.ids = HostOutput(driver, (), "int64")
        self._driver = driver
        self._block: HostBlock | None = None
        self._views: dict[StepShape, Mapping[str, npt.NDArray[Any]]] = {}

    def arrays(self, size: StepShape, layout: StepLayout) -> Mapping[str, npt.NDArray[Any]]:
        """Where the inputs of a step are gathered, by name."""
        views = self._views.get(size)
        if views is None:
            if self._block is None or layout.sizes[INPUTS] > self._block.memory.nbytes:
                self._free_block()
                self._block = HostBlock(self._driver.allocate_host(layout.sizes[INPUTS]))
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            views = self._views[size] = self._block.views(layout.inputs)
        return views

    def send(self, address: int, num_bytes: int) -> None:
        """Put the copy of the gathered inputs on the stream."""
        if self._block is not None:
            self._driver.copy_in(address, self._block.address, num_bytes)

    def _free_block(self) -> None:
        self._views.clear()
        if self._block is not None:
            self._driver.free_host(self._block.memory)
            self._block = None

    def close(self) -> None:
        """Give the memory back."""
        self._free_block()
        self.ids.close()
