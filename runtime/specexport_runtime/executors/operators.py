"""The library of our own operators for ONNX Runtime on the CPU, registered with a session."""

import sys
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.files import native_path
from specexport_runtime.errors import MissingDependencyError

_SUFFIX = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
_LIBRARY = Path(__file__).resolve().parents[1] / f"_operators.{_SUFFIX}"


def register(options: Any) -> None:
    """Make our operators known to a session that is to be opened.

    Args:
        options: its ``onnxruntime.SessionOptions``.

    Raises:
        MissingDependencyError: there is no library.
    """
    if not _LIBRARY.is_file():
        raise MissingDependencyError(f"{_LIBRARY} is missing: it has the CPU's operators.", "run `make install`.")
    options.register_custom_ops_library(native_path(_LIBRARY))
