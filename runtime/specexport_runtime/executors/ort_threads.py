"""The threads of ONNX Runtime's sessions: a pool for each, or one for all where the process is ours alone.

Two engines take turns on the same cores. With a pool each, the idle threads of one spin while the other computes. In
one pool they are the same threads. But once ONNX Runtime 1.31 has that pool, it refuses every session of the process
with separate threads, so it is not for programs that may have other sessions. Imports onnxruntime when it is used.
"""

import threading
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.machine import available_cores

_lock = threading.Lock()
_shared: list[int] = []


def join_threads(num_threads: int | None, *, spin: bool, begin: bool) -> bool:
    """Whether the sessions of an engine that is to be opened take the threads that this process shares.

    ``num_threads`` counts the calling thread; None takes the cores available, or the shared threads. ``begin`` shares
    from now on, if idle threads shall ``spin``. InvalidRequestError if threads are shared, and others are asked for.
    """
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
