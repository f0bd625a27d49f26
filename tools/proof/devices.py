"""Where a proof engine runs: a CUDA stream with memory that the executor owns, or a CPU that plays one."""
# mypy: disable-error-code="no-any-unimported"

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.gpu import ALIGNMENT, ByteArray, GpuInfo, make_out_of_memory_error
from specexport_runtime.executors.row_kernels import ARGUMENTS, CONSTANTS

if TYPE_CHECKING:
    from torch import Tensor


class Device(Protocol):
    """What an engine needs of its device."""

    name: str
    """For torch."""

    def view(self, address: int, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """A tensor over memory that another object owns."""
        ...

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """Put work on a stream."""
        ...


class _Memory:
    """Bytes at an address, in the form in which torch takes them without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class CudaDevice:
    """The current CUDA device.

    What torch allocates while an engine runs comes from the engine's pool, which is never given back before the engine
    is: a recorded CUDA graph keeps these addresses. All steps of an engine run one after another on one stream, so they
    may use the same memory. A step runs once before it is recorded; all it needs is in the pool then.
    """

    name = "cuda"

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        self._pool = torch.cuda.MemPool()
        self._streams: dict[int, Any] = {}

    def view(self, address: int, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """See ``Device.view``."""
        import torch

        kind = getattr(torch, dtype)
        num_bytes = int(np.prod(shape)) * kind.itemsize
        flat: Tensor = torch.as_tensor(_Memory(address, num_bytes), device="cuda")
        if flat.data_ptr() != address:
            raise SpecexportError("torch has copied memory that it was to use in place.")
        return flat.view(kind).view(shape)

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """See ``Device.put``. Waits for nothing."""
        import torch

        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(self._streams[stream]), torch.cuda.use_mem_pool(self._pool):
            work()


class HostGpu:
    """A ``GpuDriver`` and a ``Device`` on the CPU, for dry runs and tests: kernels are interpreted.

    Memory is poisoned where it is allocated (NaN in every float type), addresses outside of it are errors, and work
    runs when the stream is synchronized. A recorded graph is the list of what was put on the stream meanwhile.
    """

    name = "cpu"
    runs_kernels = True

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.stream = 1
        self.replays = 0
        self._total, self._used = total_bytes, 0
        self._memory: dict[int, ByteArray] = {}
        self._queue: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._kernels: list[str] = []
        _PLAYED.add(self)

    def info(self) -> GpuInfo:
        """See ``GpuDriver.info``."""
        return GpuInfo("a CPU that interprets kernels", "sm90", self._total, self._total - self._used)

    def allocate(self, num_bytes: int, what: str) -> int:
        """See ``GpuDriver.allocate``."""
        if self._used + num_bytes > self._total:
            raise make_out_of_memory_error(what, num_bytes, self.info())
        return int(self.allocate_host(num_bytes).ctypes.data)

    def free(self, address: int) -> None:
        """See ``GpuDriver.free``."""
        self._used -= self._memory.pop(address).size

    def allocate_host(self, num_bytes: int) -> ByteArray:
        """See ``GpuDriver.allocate_host``; both kinds of memory are one here."""
        size = max(num_bytes, 1)
        space = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        memory = space[-space.ctypes.data % ALIGNMENT :][:size]
        self._memory[int(memory.ctypes.data)] = memory
        self._used += size
        return memory

    def free_host(self, memory: ByteArray) -> None:
        """See ``GpuDriver.free_host``."""
        self.free(int(memory.ctypes.data))

    def _bytes(self, address: int, num_bytes: int) -> ByteArray:
        for start, memory in self._memory.items():
            if start <= address and address + num_bytes <= start + memory.size:
                return memory[address - start :][:num_bytes]
        raise SpecexportError(f"there is no memory of {num_bytes} bytes at {address:#x}.")

    def view(self, address: int, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """See ``Device.view``."""
        import torch

        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return torch.from_numpy(self._bytes(address, num_bytes).view(dtype).reshape(shape))

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """See ``Device.put``."""
        if stream != self.stream:
            raise SpecexportError(f"stream {stream} is not this driver's.")
        (self._queue if self._recording is None else self._recording).append(work)

    def clear(self, address: int, num_bytes: int) -> None:
        """See ``GpuDriver.clear``."""
        self.put(self.stream, lambda: self._bytes(address, num_bytes).fill(0))

    def copy_in(self, destination: int, source: int, num_bytes: int) -> None:
        """See ``GpuDriver.copy_in``."""
        self.copy_rows(destination, source, num_bytes, 1, num_bytes)

    def copy_out(self, destination: int, source: int, num_bytes: int) -> None:
        """See ``GpuDriver.copy_out``."""
        self.copy_rows(destination, source, num_bytes, 1, num_bytes)

    def copy_rows(self, destination: int, source: int, width: int, height: int, pitch: int) -> None:
        """See ``GpuDriver.copy_rows``."""

        def copy() -> None:
            for i in range(height):
                self._bytes(destination + i * pitch, width)[:] = self._bytes(source + i * pitch, width)

        self.put(self.stream, copy)

    def synchronize(self) -> None:
        """See ``GpuDriver.synchronize``."""
        if self._recording is not None:
            raise SpecexportError("synchronizing breaks a recording.")
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def begin_capture(self) -> None:
        """See ``GpuDriver.begin_capture``."""
        self._recording = []

    def end_capture(self) -> int:
        """See ``GpuDriver.end_capture``."""
        recorded, self._recording = self._recording or [], None
        self._graphs[len(self._graphs) + 1] = recorded
        return len(self._graphs)

    def launch(self, graph: int) -> None:
        """See ``GpuDriver.launch``."""
        self.replays += 1
        for work in self._graphs[graph]:
            self.put(self.stream, work)

    def free_graph(self, graph: int) -> None:
        """See ``GpuDriver.free_graph``."""
        self._graphs[graph] = []

    def load_kernel(self, ptx: str, name: str) -> int:
        """See ``GpuDriver.load_kernel``: the source of the PTX, to be interpreted."""
        if f".entry {name}(" not in ptx:
            raise SpecexportError(f"there is no kernel {name} in this PTX.")
        self._kernels.append(name)
        return len(self._kernels) - 1

    def launch_kernel(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        threads: int,  # noqa: ARG002
        shared: int,  # noqa: ARG002
        arguments: Sequence[int],
    ) -> None:
        """See ``GpuDriver.launch_kernel``."""
        name, arguments = self._kernels[kernel], tuple(arguments)

        def run() -> None:
            import torch

            from specexport.kernels import sampling

            types = ARGUMENTS[name]
            given = [
                torch.from_numpy(memory_at(value, _TYPES[kind])) if kind.startswith("*") else value
                for value, kind in zip(arguments, types, strict=True)
            ]
            function = getattr(sampling, name)
            constants = {key: CONSTANTS[key] for key in function.arg_names[len(types) :]}
            function[grid](*given, **constants)

        self.put(self.stream, run)

    def close(self) -> None:
        """See ``GpuDriver.close``."""
        self._queue.clear()


_PLAYED: "weakref.WeakSet[HostGpu]" = weakref.WeakSet()
"""All of them are streams of one device: kernels of one may read the memory of another."""
_TYPES = {"*fp32": "float32", "*fp64": "float64", "*i32": "int32", "*i64": "int64"}


def memory_at(address: int, dtype: str) -> "np.typing.NDArray[Any]":
    """Memory of any of them from an address on, to the end of its allocation."""
    for gpu in _PLAYED:
        for start, memory in gpu._memory.items():
            if start <= address < start + memory.size:
                there, size = memory[address - start :], np.dtype(dtype).itemsize
                return there[: there.size // size * size].view(dtype)
    raise SpecexportError(f"there is no memory at {address:#x}.")
