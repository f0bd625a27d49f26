"""Sessions of ONNX Runtime on the CPU over a bundle's engine, whose weights are mapped from its file.

The threads are a pool for each session, or one for all where the process is ours alone: idle threads of one pool spin
while another computes. Once ONNX Runtime 1.31 has the shared pool, it refuses every session with separate threads.
Imports onnxruntime when it is used.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.abi import CACHE_INPUTS, STATE_INPUTS, state_shapes
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.opened import WEIGHTS
from specexport_runtime.errors import (
    MORE_MEMORY,
    BundleError,
    IncompatibleError,
    InvalidRequestError,
    MissingDependencyError,
    make_install_hint,
)
from specexport_runtime.executors.external_data import read_session_model
from specexport_runtime.executors.operators import register
from specexport_runtime.machine import available_cores, describe_memory_shortage, is_memory_error

_lock = threading.Lock()
_shared: list[int] = []
sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""All that are open."""


def _after_fork() -> None:
    """A child must free no pool of threads: glibc waits for those that sleep, and they stayed in the parent."""
    for session in sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    if _shared and hasattr(libc := ctypes.CDLL(None), "on_exit"):  # after these two: the last comes first
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def use_shared_threads(num_threads: int | None, *, spin: bool, begin: bool) -> bool:
    """Whether a new engine's sessions take the threads that this process shares, as for ``num_threads`` None."""
    import onnxruntime

    with _lock:
        if not _shared:
            if not (begin and spin):
                return False
            _shared.append(num_threads or available_cores())
            onnxruntime.set_global_thread_pool_sizes(_shared[0], 1)
    if num_threads not in (None, _shared[0]) or not spin:
        asked = f"{num_threads} compute threads are" if spin else "threads that do not spin are"
        raise InvalidRequestError(
            f"{asked} asked for, and the engines of this process share {_shared[0]} that spin (share_threads).",
            f"load it with {_shared[0]} that spin, or in another process, or share none from the first engine on.",
        )
    return True


def set_threads(options: Any, num_threads: int, *, spin: bool) -> None:
    """Set the threads in a session's ``SessionOptions``: the shared pool if there is one, else one as asked for."""
    if _shared:
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")


def open_session(path: Path, num_threads: int, spin: bool) -> Any:
    """Open an engine in an ``InferenceSession``; BundleError if ONNX Runtime cannot load it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime is not installed, and this bundle's engines run on it.", make_install_hint("cpu")
        ) from error
    options = _options(num_threads, spin)
    try:
        model = read_session_model(path, options)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
        if is_memory_error(error):
            needs = sum(file.stat().st_size for file in (path, *path.parent.glob(WEIGHTS)))
            raise IncompatibleError(f"{path}: {describe_memory_shortage(needs)}.", MORE_MEMORY) from error
        raise BundleError(f"{path}: ONNX Runtime cannot load this engine: {error}", "build it again.") from error
    sessions.add(session)
    return session


def _options(num_threads: int, spin: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    set_threads(options, num_threads, spin=spin)
    options.log_severity_level = 4  # an error is raised, and told in one line
    register(options)
    # A plan of the memory of each combination of input sizes is kept for ever, and a server meets thousands of them.
    options.enable_mem_pattern = False
    return options


class OrtGraph(NamedTuple):
    """A graph that is ready to run."""

    session: Any  # the ``onnxruntime.InferenceSession``
    inputs: frozenset[str]  # names of all its inputs


def open_graph(
    path: Path,
    entry: ModelEntry,
    step_inputs: Collection[str],
    *,
    num_threads: int,
    spin: bool,
) -> OrtGraph:
    """Open a graph whose inputs must be ``step_inputs`` and the caches and states of ``entry`` (IncompatibleError)."""
    session = open_session(path, num_threads, spin)
    inputs = frozenset(value.name for value in session.get_inputs())
    caches = {spec.name.format(i=i) for i in range(len(entry.attention.layers)) for spec in CACHE_INPUTS}
    caches |= {spec.name.format(i=i) for i in range(len(entry.states)) for spec in STATE_INPUTS}
    if inputs != caches | set(step_inputs):
        odd = sorted(inputs ^ (caches | set(step_inputs)))
        raise IncompatibleError(f"{path}: inputs differ from the manifest's: {', '.join(odd)}.", "build it again.")
    _check_sizes(path, entry, session)
    return OrtGraph(session, inputs)


def _check_sizes(path: Path, entry: ModelEntry, session: Any) -> None:
    """Compare the sizes of states: a step would find only that its memory does not fit."""
    wanted = state_shapes(entry.states, 0, 0)
    for value in session.get_inputs():
        shape = wanted.get(value.name)
        if shape is None:
            continue
        sizes = [size for size in value.shape if isinstance(size, int)]
        expected = [1, *(size for size in shape[2:] if size)]
        if sizes != expected or value.type != "tensor(float)":
            raise IncompatibleError(
                f"{path}: {value.name} has the sizes {sizes} ({value.type}), and the manifest says {expected}.",
                "build it again.",
            )
