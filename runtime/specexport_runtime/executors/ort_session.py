"""Sessions of ONNX Runtime on the CPU over a bundle's engine, whose weights are mapped from its file.

Imports onnxruntime when a session is opened, not before.
"""

from pathlib import Path
from typing import Any

from specexport_runtime.errors import BundleError, MissingDependencyError
from specexport_runtime.executors.external_data import session_model
from specexport_runtime.executors.operators import register
from specexport_runtime.executors.ort_threads import set_threads


def open_session(path: Path, num_threads: int, spin: bool) -> Any:
    """Open an engine in an ``onnxruntime.InferenceSession``; with ``spin``, its idle compute threads spin.

    MissingDependencyError without onnxruntime, BundleError if it cannot load the engine; errors of the operators'
    library are those of ``operators.register``.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime is not installed, and this bundle's engines run on it.", "pip install 'specexport[cpu]'."
        ) from error
    options = _options(num_threads, spin)
    try:
        model = session_model(path, options)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        raise BundleError(f"{path}: ONNX Runtime cannot load this engine: {error}", "build it again.") from error
    return session


def _options(num_threads: int, spin: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    set_threads(options, num_threads, spin=spin)
    options.log_severity_level = 3
    register(options)
    # A plan of the memory of each combination of input sizes is kept for ever, and a server meets thousands of them.
    options.enable_mem_pattern = False
    return options
