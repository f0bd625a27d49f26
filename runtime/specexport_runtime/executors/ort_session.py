"""Sessions of ONNX Runtime on the CPU: the bundle's engine, or its prepacked file in the user's cache.

Imports onnxruntime when a session is opened, not before.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.files import native_path
from specexport_runtime.bundle.opened import WEIGHTS
from specexport_runtime.errors import BundleError, MissingDependencyError
from specexport_runtime.executors.external_data import session_model
from specexport_runtime.executors.operators import register
from specexport_runtime.executors.ort_probe import ProbedStep, difference, probe_session, probe_widths
from specexport_runtime.executors.ort_threads import set_threads
from specexport_runtime.executors.packed_alignment import align_packed
from specexport_runtime.executors.prepacked import DATA_NAME, GRAPH_NAME, PrepackedEngine, UnprovenError
from specexport_runtime.machine import has_exact_int8_products, return_freed_memory

MIN_EXTERNAL_BYTES = 1024
"""Weights below it stay inside the graph file."""


def open_session(
    path: Path,
    num_threads: int,
    spin: bool,
    engine_hash: str | None = None,
    *,
    lookahead: int = 0,
) -> Any:
    """Open an engine.

    Args:
        path: engine file of the bundle.
        num_threads: compute threads.
        spin: let idle threads spin.
        engine_hash: hash of the graph and all its weights: the session then maps its weights from the prepacked file
            in the user's cache, which is made if it is not there. None packs them into memory of this process.
        lookahead: K of its verify steps, at whose width too a new prepacked file is compared with the engine.

    Returns:
        an ``onnxruntime.InferenceSession``.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        BundleError: ONNX Runtime cannot load the engine.
    """
    try:
        import onnxruntime  # noqa: F401 told here, in words
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime is not installed, and this bundle's engines run on it.", "pip install 'specexport[cpu]'."
        ) from error
    if engine_hash is not None:
        weights = sum(file.stat().st_size for file in path.parent.glob(WEIGHTS))
        session = PrepackedEngine(engine_hash, weights, probe_widths(lookahead)).load(
            write=lambda folder: _write_prepacked(path, folder, num_threads),
            prove=lambda folder, widths: _prove_prepacked(path, folder, num_threads, widths),
            read=lambda folder: _open_prepacked(folder, num_threads, spin),
        )
        if session is not None:
            return session
    return _open_plain(path, num_threads, spin)


def _open_plain(path: Path, num_threads: int, spin: bool) -> Any:
    try:
        session = _make_session(path, _options(num_threads, spin))
    except BundleError:
        raise
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        raise BundleError(f"{path}: ONNX Runtime cannot load this engine: {error}", "build it again.") from error
    return_freed_memory()  # what scales were made of, and weights before they were packed
    return session


def _make_session(path: Path, options: Any) -> Any:
    import onnxruntime

    model = session_model(path, options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _options(num_threads: int, spin: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    set_threads(options, num_threads, spin=spin)
    options.log_severity_level = 3
    register(options)
    # A plan of the memory of each combination of input sizes is kept for ever, and a server meets thousands of them.
    options.enable_mem_pattern = False
    if not has_exact_int8_products():
        options.add_session_config_entry("session.x64quantprecision", "1")  # slower, and never saturates
    return options


def _write_prepacked(path: Path, folder: Path, num_threads: int) -> None:
    """Write the optimized graph with its packed weights, aligned. It does not depend on ``num_threads``."""
    options = _options(num_threads, spin=False)
    options.optimized_model_filepath = native_path(folder / GRAPH_NAME)
    for key, value in (
        ("optimized_model_external_initializers_file_name", DATA_NAME),
        ("optimized_model_external_initializers_min_size_in_bytes", str(MIN_EXTERNAL_BYTES)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    _make_session(path, options)  # nothing of that is written
    return_freed_memory()
    align_packed(folder / GRAPH_NAME, folder / DATA_NAME)


def _prove_prepacked(path: Path, folder: Path, num_threads: int, widths: tuple[int, ...]) -> None:
    """Compare a prepacked file with its engine, one session after the other, so that memory holds one.

    Raises:
        UnprovenError: some logits differ or are not finite, or the file cannot be opened.
        BundleError: ONNX Runtime cannot load the engine itself.
    """
    expected = _probe(lambda: _open_plain(path, num_threads, False), widths)
    try:
        found = _probe(lambda: _open_prepacked(folder, num_threads, False), widths)
    except OSError:
        raise
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        raise UnprovenError(f"they cannot be opened ({error})") from error
    if (reason := difference(expected, found)) is not None:
        raise UnprovenError(reason)


def _probe(make_session: Callable[[], Any], widths: tuple[int, ...]) -> list[ProbedStep]:
    steps = probe_session(make_session(), widths)
    return_freed_memory()
    return steps


def _open_prepacked(folder: Path, num_threads: int, spin: bool) -> Any:
    import onnxruntime

    options = _options(num_threads, spin)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # they are in the file
    session = _make_session(folder / GRAPH_NAME, options)
    return_freed_memory()
    return session
