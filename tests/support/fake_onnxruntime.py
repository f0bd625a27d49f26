"""What the GPU executor uses of ``onnxruntime``, with "device" memory in numpy. Sessions are the test's own."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np


class FakeValue:
    """A tensor on the "device"; the log says what crossed the bus."""

    def __init__(self, ort, shape, element_type, device="cpu", device_id=0):
        if ort.free_bytes is not None:
            ort.free_bytes -= int(np.prod(shape)) * np.dtype(element_type).itemsize
            if ort.free_bytes < 0:
                raise RuntimeError("CUDA failure 2: out of memory")
        assert (device, device_id) == ("cuda", 0)
        self.ort = ort
        self.array = np.full(shape, 77, element_type)  # device memory is not zeroed

    def update_inplace(self, data):
        assert isinstance(data, np.ndarray)
        assert data.shape == self.array.shape
        assert data.dtype == self.array.dtype
        self.ort.log.append(("up", id(self)))
        self.array[...] = data

    def numpy(self):
        self.ort.log.append(("down", id(self)))
        return self.array.copy()

    def data_ptr(self):
        return self.array.ctypes.data

    def shape(self):
        return list(self.array.shape)

    def tensor_size_in_bytes(self):
        return self.array.nbytes


class FakeBinding:
    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def bind_input(self, name, device, device_id, element_type, shape, pointer):
        self.inputs[name] = (device, element_type, tuple(shape), pointer)

    def bind_output(self, name, device, device_id, element_type, shape, pointer):
        self.outputs[name] = (device, element_type, tuple(shape), pointer)

    def bind_ortvalue_input(self, name, value):
        assert value.array.dtype.name in ("int64", "int32", "float32")
        self.inputs[name] = ("cuda", value.array.dtype.type, value.array.shape, value.data_ptr())

    def bind_ortvalue_output(self, name, value):
        self.outputs[name] = ("cuda", value.array.dtype.type, value.array.shape, value.data_ptr())


def view(bound, dtype):
    _, _, shape, pointer = bound
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)


class FakeOrt:
    """What the executor uses of the module ``onnxruntime``."""

    __version__ = "1.31.0"
    __file__ = "/nowhere/onnxruntime/__init__.py"

    def __init__(self, make_session):
        self.make_session = make_session
        self.log, self.runs, self.sessions = [], [], []
        self.providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        self.free_bytes, self.element_type, self.failure = None, 10, None
        self.refuses_graphs = False
        self.OrtValue = SimpleNamespace(ortvalue_from_shape_and_type=lambda *args: FakeValue(self, *args))
        self.SessionOptions = SimpleNamespace

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
        if self.refuses_graphs and providers[0][1]["enable_cuda_graph"] == "1":
            raise RuntimeError("cannot use the graph capture feature")
        self.sessions.append(providers)
        return self.make_session(self, path)
