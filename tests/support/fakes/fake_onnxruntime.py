"""What the GPU executor uses of ``onnxruntime``, on GPUs that a CPU plays. Sessions are the test's own.

Work runs when its stream is synchronized; what is in host memory is read when a run is called. A run with a number of a
graph goes on with what was bound when that number first ran.
"""

import ctypes
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np

from specexport_runtime.executors import cuda_driver
from tests.support.fakes import row_twin
from tools.proof.devices import HostGpu, memory_at


class CountedGpu(HostGpu):
    def __init__(self, stream=1, total_bytes=1 << 30):
        super().__init__(total_bytes)
        self.stream = stream
        self.copies_in, self.copies_out, self.waits, self.closed = [], [], 0, False

    def copy_in(self, destination, source, num_bytes):
        self.copies_in.append(num_bytes)
        super().copy_in(destination, source, num_bytes)

    def copy_out(self, destination, source, num_bytes):
        self.copies_out.append(num_bytes)
        super().copy_out(destination, source, num_bytes)

    def launch_kernel(self, kernel, grid, threads, shared, arguments):
        twin = row_twin.KERNELS[self._kernels[kernel]]
        self.put(self.stream, lambda: twin(memory_at, grid, *arguments))

    def synchronize(self):
        self.waits += 1
        super().synchronize()

    def close(self):
        super().close()
        assert not self._memory, "memory was not given back"
        self.closed = True


class FakeBinding:
    def __init__(self):
        self.inputs, self.outputs, self.kept = {}, {}, []

    def bind_input(self, name, device, device_id, element_type, shape, pointer):
        assert device_id == 0
        assert pointer % (4 if device == "cuda" else 1) == 0
        self.inputs[name] = (device, element_type, tuple(shape), pointer)

    def bind_output(self, name, device, device_id, element_type, shape, pointer):
        assert device_id == 0
        self.outputs[name] = (device, element_type, tuple(shape), pointer)

    def read_host(self):
        """The same with what host memory holds now."""
        found = FakeBinding()
        found.inputs, found.outputs = dict(self.inputs), self.outputs
        for name, (device, element_type, shape, _) in self.inputs.items():
            if device == "cpu":
                found.kept.append(view(self.inputs[name], element_type).copy())
                found.inputs[name] = (device, element_type, shape, found.kept[-1].ctypes.data)
        return found


def view(bound, dtype):
    _, _, shape, pointer = bound
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)


class FakeOrt:
    """What the executor uses of the module ``onnxruntime``; :meth:`install` it."""

    __version__ = "1.31.0"
    __file__ = "/nowhere/onnxruntime/__init__.py"

    def __init__(self, make_session):
        self.make_session = make_session
        self.runs, self.sessions, self.gpus = [], [], []
        self.providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        self.has_gpu, self.gpu_bytes, self.element_type, self.failure = True, 1 << 30, 10, None
        self.refuses_graphs = False
        self.OrtValue = SimpleNamespace(ortvalue_from_shape_and_type=self._try_gpu)
        self.SessionOptions = SimpleNamespace

    def install(self, patch):
        """Put it in the place of the module, and its GPUs in that of the CUDA driver."""
        patch.setitem(sys.modules, "onnxruntime", self)
        patch.setattr(cuda_driver, "CudaDriver", self._make_gpu)
        return self

    def _make_gpu(self):
        self.gpus.append(CountedGpu(1000 + len(self.gpus), self.gpu_bytes))
        return self.gpus[-1]

    def _try_gpu(self, shape, element_type, device, device_id):
        assert (device, device_id) == ("cuda", 0)
        if not self.has_gpu:
            raise RuntimeError("CUDA failure 2: out of memory")

    def get_available_providers(self):
        return self.providers

    def set_default_logger_severity(self, severity):
        self.log_severity = severity

    def preload_dlls(self):
        sys.stdout.write("Failed to load libcublasLt.so.13")

    def RunOptions(self):
        config = {}
        return SimpleNamespace(config=config, add_run_config_entry=config.__setitem__)

    def InferenceSession(self, path, options, providers):
        if self.failure is not None:
            raise RuntimeError(self.failure)
        assert options.enable_mem_pattern is False
        provider = providers[0][1]
        if self.refuses_graphs and provider["enable_cuda_graph"] == "1":
            raise RuntimeError("cannot use the graph capture feature")
        self.sessions.append(providers)
        session = self.make_session(self, path)
        (gpu,) = (gpu for gpu in self.gpus if str(gpu.stream) == provider["user_compute_stream"])
        session.run_with_iobinding = partial(self._run, gpu, session, session.run_with_iobinding, {})
        return session

    def _run(self, gpu, session, compute, recorded, binding, options):
        number = options.config.get("gpu_graph_id", "-1")
        if number not in recorded and hasattr(session, "refuse"):
            session.refuse(options)
        bound = recorded.get(number) or binding.read_host()
        if number != "-1":
            recorded[number] = bound
        gpu.put(gpu.stream, lambda: compute(bound, options))
        if options.config.get("disable_synchronize_execution_providers") != "1":
            gpu.synchronize()
