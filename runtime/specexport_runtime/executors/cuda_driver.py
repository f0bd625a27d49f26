"""The CUDA calls of ``gpu.GpuDriver``, by way of cuda-python, which is imported when a driver is made."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from specexport_runtime.errors import IncompatibleError, MissingDependencyError, SpecexportError, make_install_hint
from specexport_runtime.executors.gpu import MEMORY_HINT, OLDEST_DRIVER, ByteArray, GpuInfo, make_out_of_memory_error

_NO_MEMORY = "cudaErrorMemoryAllocation"
_NO_DRIVER = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorInitializationError")


class CudaDriver:
    """A new stream on the current CUDA device; IncompatibleError without a GPU or a driver that is new enough."""

    runs_kernels = True

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as missing:
            raise MissingDependencyError(
                "cuda-python is not installed, and engines for NVIDIA GPUs run through it.",
                f"{make_install_hint('cuda')} Engines of TensorRT: [tensorrt-rtx] or [tensorrt].",
            ) from missing
        self._cuda: Any = runtime
        error, count = runtime.cudaGetDeviceCount()
        if _name(runtime, error) in _NO_DRIVER or (not int(error) and not count):
            raise IncompatibleError(
                f"there is no usable NVIDIA GPU or driver here ({_describe(runtime, error)}).",
                f"run this bundle on a machine with its GPU and NVIDIA driver {OLDEST_DRIVER} or newer, or build it "
                "with --backend ort-cpu; `specexport doctor` says what is missing.",
            )
        self._check(error, "finding the GPUs")
        self._device = int(self._call("cudaGetDevice"))
        self._stream = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.stream = int(self._stream)
        self._graphs: dict[int, Any] = {}
        self._kernels: list[_LoadedKernel] = []
        kinds = runtime.cudaMemcpyKind
        self._in, self._out = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._within = kinds.cudaMemcpyDeviceToDevice
        # Only this thread's calls may break a capture: other threads have their own engines and allocations.
        self._mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal

    def _check(self, error: Any, what: str) -> None:
        if not int(error):
            return
        failure = f"{what} failed on the GPU: {_describe(self._cuda, error)}."
        if _name(self._cuda, error) == _NO_MEMORY:
            self._cuda.cudaGetLastError()  # it is remembered, and the next call would report it again
            raise IncompatibleError(failure, MEMORY_HINT)
        raise SpecexportError(failure)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a CUDA runtime function, turn its status into an exception, and return its one result (or None)."""
        status, *results = getattr(self._cuda, function)(*arguments)
        if int(status):
            self._check(status, function)
        return results[0] if results else None

    def info(self) -> GpuInfo:
        """See ``GpuDriver.info``."""
        properties = self._call("cudaGetDeviceProperties", self._device)
        error, free, total = self._cuda.cudaMemGetInfo()
        self._check(error, "cudaMemGetInfo")
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        return GpuInfo(name.rstrip("\0"), f"sm{properties.major}{properties.minor}", int(total), int(free))

    def allocate(self, num_bytes: int, what: str) -> int:
        """See ``GpuDriver.allocate``."""
        error, address = self._cuda.cudaMalloc(max(num_bytes, 1))
        if _name(self._cuda, error) == _NO_MEMORY:
            self._cuda.cudaGetLastError()  # it is remembered, and the next call would report it again
            raise make_out_of_memory_error(what, num_bytes, self.info())
        self._check(error, f"allocating {what}")
        return int(address)

    def free(self, address: int) -> None:
        """See ``GpuDriver.free``."""
        self._call("cudaFree", address)

    def allocate_host(self, num_bytes: int) -> ByteArray:
        """See ``GpuDriver.allocate_host``."""
        address = int(self._call("cudaMallocHost", max(num_bytes, 1)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(num_bytes, 1)).from_address(address))

    def free_host(self, memory: ByteArray) -> None:
        """See ``GpuDriver.free_host``."""
        self._call("cudaFreeHost", memory.ctypes.data)

    def clear(self, address: int, num_bytes: int) -> None:
        """See ``GpuDriver.clear``."""
        self._call("cudaMemsetAsync", address, 0, num_bytes, self._stream)

    def copy_in(self, destination: int, source: int, num_bytes: int) -> None:
        """See ``GpuDriver.copy_in``."""
        self._call("cudaMemcpyAsync", destination, source, num_bytes, self._in, self._stream)

    def copy_out(self, destination: int, source: int, num_bytes: int) -> None:
        """See ``GpuDriver.copy_out``."""
        self._call("cudaMemcpyAsync", destination, source, num_bytes, self._out, self._stream)

    def copy_rows(self, destination: int, source: int, width: int, height: int, pitch: int) -> None:
        """See ``GpuDriver.copy_rows``."""
        arguments = (destination, pitch, source, pitch, width, height, self._within, self._stream)
        self._call("cudaMemcpy2DAsync", *arguments)

    def synchronize(self) -> None:
        """See ``GpuDriver.synchronize``."""
        self._call("cudaStreamSynchronize", self._stream)

    def begin_capture(self) -> None:
        """See ``GpuDriver.begin_capture``."""
        self._call("cudaStreamBeginCapture", self._stream, self._mode)

    def end_capture(self) -> int:
        """See ``GpuDriver.end_capture``."""
        try:
            graph = self._call("cudaStreamEndCapture", self._stream)
        except SpecexportError:
            self._cuda.cudaGetLastError()
            raise
        try:
            executable = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)
        self._graphs[int(executable)] = executable
        return int(executable)

    def launch(self, graph: int) -> None:
        """See ``GpuDriver.launch``."""
        self._call("cudaGraphLaunch", self._graphs[graph], self._stream)

    def free_graph(self, graph: int) -> None:
        """See ``GpuDriver.free_graph``."""
        self._call("cudaGraphExecDestroy", self._graphs.pop(graph))

    def load_kernel(self, ptx: str, name: str) -> int:
        """See ``GpuDriver.load_kernel``; the driver keeps what it compiled on disk."""
        self._kernels.append(_LoadedKernel(ptx, name))
        return len(self._kernels) - 1

    def launch_kernel(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared: int, arguments: Sequence[int]
    ) -> None:
        """See ``GpuDriver.launch_kernel``."""
        self._kernels[kernel].launch(grid, threads, shared, self.stream, arguments)

    def close(self) -> None:
        """See ``GpuDriver.close``."""
        while self._kernels:
            self._kernels.pop().unload()
        for graph in list(self._graphs):
            self.free_graph(graph)
        if self.stream:
            self._call("cudaStreamDestroy", self._stream)
            self.stream = 0


class _LoadedKernel:
    """A kernel by way of the CUDA driver, and memory for a launch's arguments, which are read before it returns."""

    def __init__(self, ptx: str, name: str) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._module = self._call("cuModuleLoadData", ptx.encode() + b"\0")
        self._function = self._call("cuModuleGetFunction", self._module, name.encode())
        self._values = (ctypes.c_uint64 * 16)()
        size, start = ctypes.sizeof(ctypes.c_uint64), ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * 16)(*[start + size * i for i in range(16)])

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: Sequence[int]
    ) -> None:
        """See ``GpuDriver.launch_kernel``; 32-bit arguments are the lower half of their places."""
        self._values[: len(arguments)] = list(arguments)
        pointers = ctypes.addressof(self._pointers)
        self._call("cuLaunchKernel", self._function, *grid, threads, 1, 1, shared, stream, pointers, 0)

    def unload(self) -> None:
        """Forget it."""
        self._call("cuModuleUnload", self._module)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cuda, function)(*arguments)
        if int(status):
            raise SpecexportError(f"{function} failed on the GPU: {getattr(status, 'name', status)}.")
        return results[0] if results else None


def _name(runtime: Any, error: Any) -> str:
    return bytes(runtime.cudaGetErrorName(error)[1]).decode()


def _describe(runtime: Any, error: Any) -> str:
    return f"{_name(runtime, error)}: {bytes(runtime.cudaGetErrorString(error)[1]).decode()}"
