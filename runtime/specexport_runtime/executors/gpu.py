"""What an executor needs of a GPU: a protocol, so that tests can put a fake in its place.

One driver is one stream on one device. Everything between two :meth:`GpuDriver.synchronize` calls runs in order, and
the host memory that it reads or writes must be left alone until then. ``cuda_driver`` is the real one. Imports numpy
only.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import IncompatibleError

ByteArray = npt.NDArray[np.uint8]
ALIGNMENT = 256
"""Bytes that the address of every tensor must be a multiple of; what ``cudaMalloc`` gives, and TensorRT asks for."""
OLDEST_DRIVER = 580
"""Version of the NVIDIA driver from which CUDA 13 runs, for which all packages are."""
MEMORY_HINT = (
    "lower --max-num-seqs, build the bundle again with a smaller --max-model-len, or end other programs on the GPU."
)


class GpuInfo(NamedTuple):
    """What an executor must know of a GPU."""

    name: str  # for people, for example "NVIDIA L4"
    sm: str  # architecture, for example "sm89"
    total_bytes: int  # of its memory
    free_bytes: int  # free when the driver was asked


class GpuDriver(Protocol):
    """One stream on one GPU. Addresses are plain integers; ``graph`` handles belong to the driver that made them."""

    stream: int
    """The stream's handle, for engines that enqueue work on it."""

    def info(self) -> GpuInfo:
        """The device, and its free memory at this moment."""
        ...

    def allocate(self, num_bytes: int, what: str) -> int:
        """Address of new device memory for ``what``, aligned and not cleared; IncompatibleError names both sizes."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def allocate_host(self, num_bytes: int) -> ByteArray:
        """Pinned host memory, which copies need to be asynchronous."""
        ...

    def free_host(self, memory: ByteArray) -> None:
        """Give pinned memory back; no view of it may be used any more."""
        ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Zero device memory."""
        ...

    def copy_in(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy host memory (its address) to the device."""
        ...

    def copy_out(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy device memory to the host."""
        ...

    def copy_rows(self, destination: int, source: int, width: int, height: int, pitch: int) -> None:
        """Copy ``height`` runs of ``width`` bytes that begin ``pitch`` bytes apart, within the device."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has done everything."""
        ...

    def begin_capture(self) -> None:
        """Record what is put on the stream from now on, instead of running it."""
        ...

    def end_capture(self) -> int:
        """Stop recording and give a graph that :meth:`launch` replays; SpecexportError if that failed."""
        ...

    def launch(self, graph: int) -> None:
        """Put a recorded graph on the stream."""
        ...

    def free_graph(self, graph: int) -> None:
        """Forget a graph."""
        ...

    runs_kernels: bool
    """Whether :meth:`load_kernel` and :meth:`launch_kernel` are there."""

    def load_kernel(self, ptx: str, name: str) -> int:
        """Compile PTX for the device and give the entry ``name``; SpecexportError if the driver refuses it."""
        ...

    def launch_kernel(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared: int, arguments: Sequence[int]
    ) -> None:
        """Put a kernel on the stream: programs, threads of one, bytes of shared memory; addresses and 32-bit ints."""
        ...

    def close(self) -> None:
        """Give the stream back."""
        ...


def make_out_of_memory_error(what: str, wanted: int, gpu: GpuInfo) -> IncompatibleError:
    """The error for ``what``, which wants more memory than the GPU has free."""
    return IncompatibleError(
        f"{what} wants {format_gib(wanted)} of GPU memory; {gpu.name} has {format_gib(gpu.free_bytes)} free of "
        f"{format_gib(gpu.total_bytes)}.",
        MEMORY_HINT,
    )


def format_gib(num_bytes: int) -> str:
    """Bytes for people: GiB, or MiB below one GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
