"""The CUDA driver: clean refusals where there is no GPU, and its calls against a stand-in for cuda-python."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from specexport_runtime.errors import IncompatibleError, MissingDependencyError, SpecexportError
from specexport_runtime.executors.cuda_driver import CudaDriver

bindings = pytest.importorskip("cuda.bindings")
real = pytest.importorskip("cuda.bindings.runtime")


def test_a_machine_without_a_gpu_is_told_so():
    if int(real.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("this machine has a GPU")
    with pytest.raises(IncompatibleError, match="no usable NVIDIA GPU or driver here") as caught:
        CudaDriver()
    assert "cudaError" in caught.value.message
    assert "--backend ort-cpu" in caught.value.hint
    assert caught.value.exit_code == 3


def test_cuda_python_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError, match="cuda-python") as caught:
        CudaDriver()
    assert "pip install -e '.[cuda]'" in caught.value.hint
    assert "[tensorrt-rtx]" in caught.value.hint


class Runtime:
    """Answers like ``cuda.bindings.runtime``: a status first, then results. Writes down what it was asked."""

    RESULTS = {  # noqa: RUF012
        "cudaGetDeviceCount": (1,),
        "cudaGetDevice": (0,),
        "cudaStreamCreateWithFlags": (real.cudaStream_t(1234),),
        "cudaGetDeviceProperties": (SimpleNamespace(name=b"NVIDIA L4\0\0", major=8, minor=9),),
        "cudaMemGetInfo": (5 << 30, 24 << 30),
        "cudaMalloc": (4096,),
        "cudaStreamEndCapture": (real.cudaGraph_t(55),),
        "cudaGraphInstantiate": (real.cudaGraphExec_t(66),),
    }

    def __init__(self):
        self.asked = []
        self.failing = {}
        self.memory = ctypes.create_string_buffer(64)

    def __getattr__(self, name):
        value = getattr(real, name)  # a name that cuda-python does not have is an error here too
        if not callable(value) or name.startswith("cudaGetError") or isinstance(value, type):
            return value

        def function(*arguments):
            self.asked.append((name, *arguments))
            if name in self.failing:
                return (self.failing[name], *[None] * len(self.RESULTS.get(name, ())))
            if name == "cudaMallocHost":
                return (real.cudaError_t.cudaSuccess, ctypes.addressof(self.memory))
            return (real.cudaError_t.cudaSuccess, *self.RESULTS.get(name, ()))

        return function

    @property
    def names(self):
        return [asked[0] for asked in self.asked]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(bindings, "runtime", made)
    return made


def test_what_it_says_of_the_device(runtime):
    info = CudaDriver().info()
    assert info == ("NVIDIA L4", "sm89", 24 << 30, 5 << 30)


def test_work_goes_to_its_own_stream_in_order(runtime):
    driver = CudaDriver()
    assert driver.stream == 1234
    runtime.asked.clear()
    driver.clear(4096, 100)
    driver.copy_in(4096, 1, 100)
    driver.copy_out(2, 4096, 100)
    driver.copy_rows(8192, 4096, 64, 3, 256)
    driver.synchronize()
    kinds, stream = real.cudaMemcpyKind, int(runtime.RESULTS["cudaStreamCreateWithFlags"][0])
    assert [tuple(int(x) if not isinstance(x, str) else x for x in asked) for asked in runtime.asked] == [
        ("cudaMemsetAsync", 4096, 0, 100, stream),
        ("cudaMemcpyAsync", 4096, 1, 100, int(kinds.cudaMemcpyHostToDevice), stream),
        ("cudaMemcpyAsync", 2, 4096, 100, int(kinds.cudaMemcpyDeviceToHost), stream),
        ("cudaMemcpy2DAsync", 8192, 256, 4096, 256, 64, 3, int(kinds.cudaMemcpyDeviceToDevice), stream),
        ("cudaStreamSynchronize", stream),
    ]


def test_pinned_memory_is_an_array_over_it(runtime):
    driver = CudaDriver()
    memory = driver.allocate_host(64)
    memory[:] = np.arange(64)
    assert runtime.memory.raw == bytes(range(64))
    driver.free_host(memory)
    assert runtime.asked[-1] == ("cudaFreeHost", ctypes.addressof(runtime.memory))


def test_a_recording_becomes_a_graph_that_can_be_launched(runtime):
    driver = CudaDriver()
    runtime.asked.clear()
    driver.begin_capture()
    graph = driver.end_capture()
    driver.launch(graph)
    driver.close()
    assert runtime.asked[0][2] == real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    assert runtime.names == [
        "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphDestroy", "cudaGraphLaunch",
        "cudaGraphExecDestroy", "cudaStreamDestroy",
    ]  # fmt: skip
    driver.close()
    assert runtime.names.count("cudaStreamDestroy") == 1


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cudaMallocHost", lambda driver: driver.allocate_host(64)),
        ("cudaGraphInstantiate", lambda driver: driver.end_capture()),
    ],
)
def test_memory_that_cannot_be_had_names_what_to_lower(runtime, function, call):
    driver = CudaDriver()
    runtime.failing[function] = real.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(IncompatibleError, match=f"{function} failed on the GPU: cudaErrorMemoryAllocation") as caught:
        call(driver)
    assert "--max-num-seqs" in caught.value.hint
    assert "cudaGetLastError" in runtime.names, "it is remembered, and the next call would report it again"


@pytest.mark.parametrize("function", ["cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_recording_that_fails_leaves_no_graph_behind(runtime, function):
    driver = CudaDriver()
    runtime.failing[function] = real.cudaError_t.cudaErrorStreamCaptureInvalidated
    with pytest.raises(SpecexportError, match="cudaErrorStreamCaptureInvalidated"):
        driver.end_capture()
    assert ("cudaGraphDestroy" in runtime.names) == (function == "cudaGraphInstantiate")
    assert runtime.names[-1] == "cudaGetLastError" or function == "cudaGraphInstantiate"


def test_memory_that_runs_out_names_both_numbers_and_what_to_lower(runtime):
    driver = CudaDriver()
    assert driver.allocate(100, "the KV cache") == 4096
    runtime.failing["cudaMalloc"] = real.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(IncompatibleError) as caught:
        driver.allocate(7 << 30, "the KV cache")
    assert caught.value.message == (
        "the KV cache wants 7.00 GiB of GPU memory; NVIDIA L4 has 5.00 GiB free of 24.00 GiB."
    )
    assert "--max-num-seqs" in caught.value.hint
    assert "--max-model-len" in caught.value.hint
    assert "cudaGetLastError" in runtime.names


def test_other_statuses_become_errors_with_their_names(runtime):
    driver = CudaDriver()
    runtime.failing = {
        "cudaMemcpyAsync": real.cudaError_t.cudaErrorIllegalAddress,
        "cudaMalloc": real.cudaError_t.cudaErrorIllegalAddress,
        "cudaStreamSynchronize": real.cudaError_t.cudaErrorLaunchFailure,
    }
    with pytest.raises(SpecexportError, match="cudaMemcpyAsync failed on the GPU: cudaErrorIllegalAddress"):
        driver.copy_in(1, 2, 3)
    with pytest.raises(SpecexportError, match="allocating logits failed on the GPU: cudaErrorIllegalAddress"):
        driver.allocate(3, "logits")
    with pytest.raises(SpecexportError, match="cudaErrorLaunchFailure"):
        driver.synchronize()


@pytest.mark.parametrize("name", ["cudaErrorNoDevice", "cudaErrorInsufficientDriver", None])
def test_no_device_in_every_form(runtime, name):
    if name is None:
        runtime.RESULTS = {**runtime.RESULTS, "cudaGetDeviceCount": (0,)}
    else:
        runtime.failing["cudaGetDeviceCount"] = getattr(real.cudaError_t, name)
    with pytest.raises(IncompatibleError, match="no usable NVIDIA GPU"):
        CudaDriver()


class Kernels:
    """Answers like ``cuda.bindings.driver``."""

    def __init__(self):
        self.asked, self.failing = [], {}

    def __getattr__(self, name):
        result = {"cuModuleLoadData": ("module",), "cuModuleGetFunction": ("function",)}.get(name, ())

        def function(*arguments):
            if name == "cuLaunchKernel":  # it reads the arguments at once
                pointers = (ctypes.c_void_p * 3).from_address(arguments[9])
                arguments += tuple(ctypes.c_uint64.from_address(each).value for each in pointers)
            self.asked.append((name, *arguments))
            return (self.failing.get(name, 0), *result)

        return function


def test_kernels_are_compiled_once_and_launched_with_their_arguments(runtime, monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(bindings, "driver", kernels, raising=False)
    driver = CudaDriver()
    assert driver.runs_kernels
    number = driver.load_kernel(".version 8.7", "draw")
    driver.launch_kernel(number, (3, 2, 1), 128, 48, (0x7F0000000000, 1 << 40, 151_936))
    driver.close()
    (load, find, launch, unload) = kernels.asked
    assert load == ("cuModuleLoadData", b".version 8.7\0")
    assert find == ("cuModuleGetFunction", "module", b"draw")
    assert launch[:10] == ("cuLaunchKernel", "function", 3, 2, 1, 128, 1, 1, 48, 1234)
    assert launch[11:] == (0, 0x7F0000000000, 1 << 40, 151_936)
    assert unload == ("cuModuleUnload", "module")


def test_a_driver_that_is_too_old_for_the_kernels_says_so(runtime, monkeypatch):
    kernels = Kernels()
    kernels.failing["cuModuleLoadData"] = 222
    monkeypatch.setattr(bindings, "driver", kernels, raising=False)
    with pytest.raises(SpecexportError, match="cuModuleLoadData failed on the GPU: 222"):
        CudaDriver().load_kernel(".version 99", "draw")
