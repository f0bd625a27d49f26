"""Kernels that TensorRT for RTX compiles when a context first meets a shape, kept in a file between runs.

The file holds code that this process runs on the GPU: it is read only where no other user could have written it.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.user_cache import cache_folder, is_private, replace_file

KIND = "rtx-kernels"


class RtxKernels:
    """The runtime cache of one engine, in the user cache folder: it fits one engine file, GPU and version."""

    def __init__(self, path: Path, file: EngineFile, gpu_name: str) -> None:
        gpu = "-".join("".join(c if c.isalnum() else " " for c in gpu_name).split())
        # Not by content: hashing gigabytes again would cost more than compiling.
        state = path.stat()
        engine = hashlib.sha256(os.fsencode(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}")).hexdigest()[:16]
        self._name = f"{engine}-{file.builder_version}-{gpu}.bin"
        self._cache: Any = None
        self._loaded = 0

    def configure(self, trt: Any, config: Any, *, is_fixed: bool) -> None:
        """Set what RTX adds to the configuration (``IRuntimeConfig``) of a context.

        In a fixed profile kernels are compiled before the first run: a graph would keep the stand-ins it recorded.
        Ranged profiles meet a new size with every prompt. Compiling for each would never end, and which kernel runs
        would depend on timing, so they keep to the kernels that take any size.
        """
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # the executor records its own
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if is_fixed else strategies.NONE
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            kernels = self._read()
            # TensorRT refuses the cache of another driver or GPU; it is written anew then.
            self._loaded = len(kernels) if kernels and self._cache.deserialize(kernels) else 0
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
