"""TensorRT and TensorRT for RTX as the executor sees them: an engine, its tensors, and one context for each profile.

Both packages have one API; they differ in their names and in what RTX adds: it compiles kernels when a context first
meets a shape, which are kept in a file between runs. The file holds code that this process runs on the GPU: it is read
only where no other user could have written it. Imports either package when an engine is loaded.
"""

import ctypes
import gc
import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.errors import (
    BundleError,
    IncompatibleError,
    MissingDependencyError,
    SpecexportError,
    make_install_hint,
)
from specexport_runtime.executors.gpu import MEMORY_HINT, OLDEST_DRIVER
from specexport_runtime.user_cache import cache_folder, is_private, replace_file

KIND = "rtx-kernels"

RTX = "tensorrt-rtx"
_MODULES = {"tensorrt": "tensorrt", RTX: "tensorrt_rtx"}
_LOCK = threading.RLock()
_log = logging.getLogger(__name__)


class RtxKernels:
    """The runtime cache of one engine, in the user cache folder: it fits one engine file, GPU and version."""

    def __init__(self, path: Path, file: EngineFile, gpu_name: str) -> None:
        gpu = "-".join("".join(c if c.isalnum() else " " for c in gpu_name).split())
        # Not by content: hashing gigabytes again would cost more than compiling.
        state = path.stat()
        engine = hashlib.sha256(os.fsencode(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}")).hexdigest()[:16]
        self._name = f"{engine}-{file.builder_version}-{gpu}.bin"
        self._path = path
        self._cache: Any = None
        self._loaded = 0

    def configure(self, trt: Any, config: Any, *, is_fixed: bool) -> None:
        """Set what RTX adds to the configuration (``IRuntimeConfig``) of a context.

        In a fixed profile kernels are compiled before the first run: a graph would keep its stand-ins. Ranged profiles
        keep to kernels that take any size: compiling for each new size would never end.
        """
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # the executor records its own
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if is_fixed else strategies.NONE
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            kernels = self._read()
            # TensorRT refuses the cache of another driver or GPU; it is written anew then.
            self._loaded = len(kernels) if kernels and self._cache.deserialize(kernels) else 0
            if not self._loaded:
                self._log_first_compile()
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the file in one step, if kernels were added. One that cannot be written is no error."""
        kernels = b"" if self._cache is None else bytes(self._cache.serialize() or b"")
        self._cache = None
        if len(kernels) <= self._loaded:
            return
        folder = cache_folder(KIND)
        if folder is None:
            return
        with suppress(OSError):
            replace_file(folder / self._name, lambda file: file.write(kernels))

    def _log_first_compile(self) -> None:
        """The one line of the first load, which is silent for minutes."""
        folder = cache_folder(KIND)
        kept = "without a cache folder each load does" if folder is None else f"later loads take them from {folder}"
        _log.warning("TensorRT-RTX compiles kernels for %s, for one to three minutes; %s.", self._path, kept)

    def _read(self) -> bytes:
        """What was kept; nothing where it is missing, or open to the writing of others."""
        folder = cache_folder(KIND, writable=False)
        if folder is None:
            return b""
        try:
            with (folder / self._name).open("rb") as file:
                return file.read() if is_private(os.fstat(file.fileno())) else b""
        except OSError:
            return b""


@contextmanager
def _disable_gc() -> Iterator[None]:
    """Make or release objects of TensorRT with no other being released meanwhile.

    TensorRT holds an inner lock while it does either, and logs under it. Our logger is Python: a garbage collection
    in it, or another thread, that released a runtime left over from before would wait for that lock for ever.
    """
    with _LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class EngineTensor(NamedTuple):
    """An input or output of an engine: its name, and its shape with -1 where profiles differ."""

    name: str
    shape: tuple[int, ...]
    is_input: bool


class EngineContext(Protocol):
    """One profile of an engine, with addresses bound by tensor name."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Size of an input from now on."""
        ...

    def set_address(self, name: str, address: int) -> None:
        """Device memory of a tensor from now on."""
        ...

    def enqueue(self, stream: int) -> None:
        """Put one run on the stream; SpecexportError with what TensorRT logged if it refuses."""
        ...

    def is_capturable(self, stream: int) -> bool:
        """Whether a run may be recorded into a CUDA graph."""
        ...


class TrtEngine(Protocol):
    """A loaded engine."""

    tensors: tuple[EngineTensor, ...]
    activation_bytes: int
    """Device memory that every context needs; contexts that never run at the same time may share it."""

    def make_context(self, profile: int, activations: int, stream: int, *, is_fixed: bool) -> EngineContext:
        """A context for a profile over ``activation_bytes`` of memory; ``is_fixed``: kernels for that size pay."""
        ...

    def close(self) -> None:
        """Release the engine and its contexts."""
        ...


def load_engine(path: Path, file: EngineFile, gpu_name: str) -> TrtEngine:
    """Load an engine file, with the package that built it; RTX keeps compiled kernels under ``gpu_name``."""
    trt = _import_package(file)
    messages: list[str] = []
    logger = _make_logger(trt, messages)
    data = path.read_bytes()
    with _disable_gc():
        runtime = trt.Runtime(logger)
        if messages:  # without a usable driver it is a null pointer: to call or to release it ends the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        engine = runtime.deserialize_cuda_engine(data) if data and not messages else None
        if engine is None:
            del runtime  # or the error's traceback would keep it, to be released at any time
    if engine is None:
        what = f"{path}: {file.builder} {trt.__version__} cannot load this engine of {len(data)} bytes"
        raise _make_load_error(what, messages, make_rebuild_hint(file))
    return LoadedEngine(
        trt, runtime, engine, logger, messages, RtxKernels(path, file, gpu_name) if file.builder == RTX else None
    )


def _import_package(file: EngineFile) -> Any:
    try:
        trt = importlib.import_module(_MODULES[file.builder])
    except KeyError as error:
        raise IncompatibleError(
            f"{file.path}: built by {file.builder!r}, which this runtime does not know.", "upgrade specexport."
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"{file.builder} is not installed, and {file.path} runs on it.",
            make_install_hint(file.builder),
        ) from error
    if trt.__version__ != file.builder_version:
        raise IncompatibleError(
            f"{file.path}: built by {file.builder} {file.builder_version}, but {trt.__version__} is installed.",
            f"install that version, or {make_rebuild_hint(file)}",
        )
    return trt


def _make_logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps errors and warnings for our own messages, and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the class exists only once the package is imported
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                messages.append(message)
                del messages[:-20]

    return Log()


def make_rebuild_hint(file: EngineFile) -> str:
    """A hint: the command that builds an engine file anew, for the same GPU."""
    return f"build it again here with `specexport build --backend {file.builder} --sm {file.sm.removeprefix('sm')}`."


def _make_load_error(what: str, messages: list[str], hint: str) -> SpecexportError:
    """The error for an engine that could not be loaded: the machine's fault, or the file's, which ``hint`` mends."""
    if any("out of memory" in message.lower() for message in messages):
        return IncompatibleError(f"{what}: {_find_first_message(messages)}", MEMORY_HINT)
    if "cuda runtime" in _find_first_message(messages).lower() or "CUDA initialization" in _find_first_message(
        messages
    ):
        return IncompatibleError(
            f"{what}: {_find_first_message(messages)}",
            f"check the NVIDIA driver with `nvidia-smi`: {OLDEST_DRIVER} or newer is needed.",
        )
    return BundleError(f"{what}: {_find_first_message(messages)}", hint)


def _make_call_error(what: str, messages: list[str]) -> SpecexportError:
    """The error for a call that a loaded engine refused; lack of memory has its remedy."""
    if any("out of memory" in message.lower() for message in messages):
        return IncompatibleError(f"{what}: {_find_first_message(messages)}", MEMORY_HINT)
    return SpecexportError(f"{what}: {_find_first_message(messages)}")


def _find_first_message(messages: list[str]) -> str:
    """The first thing that TensorRT complained of; what follows are consequences."""
    return messages[0].strip() if messages else "it gave no reason."


class LoadedEngine:
    """An engine of either package; see ``TrtEngine``."""

    def __init__(
        self, trt: Any, runtime: Any, engine: Any, logger: Any, messages: list[str], kernels: RtxKernels | None
    ) -> None:
        self._trt, self._runtime, self._engine, self._logger = trt, runtime, engine, logger
        self._messages = messages
        self._kernels = kernels
        self.activation_bytes = int(engine.device_memory_size_v2)
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.tensors = tuple(
            EngineTensor(
                name,
                tuple(int(size) for size in engine.get_tensor_shape(name)),
                engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            )
            for name in names
        )

    def make_context(self, profile: int, activations: int, stream: int, *, is_fixed: bool) -> "LoadedContext":
        """See ``TrtEngine.make_context``."""
        ours = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with _disable_gc():
            if self._kernels is None:
                context = self._engine.create_execution_context(ours)
            else:
                config = self._engine.create_runtime_config()
                config.set_execution_context_allocation_strategy(ours)
                self._kernels.configure(self._trt, config, is_fixed=is_fixed)
                context = self._engine.create_execution_context(config)
        if context is None:
            raise _make_call_error("TensorRT cannot make a context", self._messages)
        context.set_device_memory(activations, self.activation_bytes)
        made = LoadedContext(context, self._messages)
        made.require(context.set_optimization_profile_async(profile, stream), f"set profile {profile}")
        return made

    def close(self) -> None:
        """See ``TrtEngine.close``; keeps the kernels that RTX compiled."""
        if self._kernels is not None:
            self._kernels.save()
        with _disable_gc():
            self._kernels = self._engine = self._runtime = None


class LoadedContext:
    """A context of either package; see ``EngineContext``."""

    def __init__(self, context: Any, messages: list[str]) -> None:
        self._context, self._messages = context, messages

    def require(self, success: bool, what: str) -> None:
        """Turn TensorRT's False into an error with what it logged."""
        if not success:
            raise _make_call_error(f"TensorRT could not {what}", self._messages)

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """See ``EngineContext.set_shape``."""
        self.require(self._context.set_input_shape(name, shape), f"take {name} of shape {list(shape)}")

    def set_address(self, name: str, address: int) -> None:
        """See ``EngineContext.set_address``."""
        self.require(self._context.set_tensor_address(name, address), f"bind {name}")

    def enqueue(self, stream: int) -> None:
        """See ``EngineContext.enqueue``."""
        self._messages.clear()
        self.require(self._context.execute_async_v3(stream), "run the step")

    def is_capturable(self, stream: int) -> bool:
        """See ``EngineContext.is_capturable``; TensorRT proper does not say, so it is tried."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))


def list_mismatched_tensors(engine: TrtEngine, wanted: Iterable[str]) -> list[str]:
    """Names that the engine has and the manifest does not, or the other way round, sorted."""
    return sorted({tensor.name for tensor in engine.tensors} ^ set(wanted))
