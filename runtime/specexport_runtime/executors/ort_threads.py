"""The threads of ONNX Runtime's sessions: a pool for each, or one for all where the process is ours alone.

Two engines take turns on the same cores. With a pool each, the idle threads of one spin while the other computes. In
one pool they are the same threads. But once ONNX Runtime 1.31 has that pool, it refuses every session of the process
with threads of its own, so it is not for programs that may have other sessions. Imports onnxruntime when it is used.
"""

import threading
from typing import Any

_lock = threading.Lock()
_shared: list[int] = []


def share_threads(num_threads: int) -> None:
    """Let all sessions that are opened in this process from now on share one pool; the first call sets its size.

    Args:
        num_threads: compute threads, the calling one included.
    """
    import onnxruntime

    with _lock:
        if not _shared:
            onnxruntime.set_global_thread_pool_sizes(num_threads, 1)
            _shared.append(num_threads)


def set_threads(options: Any, num_threads: int, *, spin: bool) -> None:
    """Set the threads of a session that is to be opened.

    Args:
        options: its ``onnxruntime.SessionOptions``.
        num_threads: compute threads of its own pool; of no account where the pool is shared.
        spin: let idle threads spin; those of the shared pool do.
    """
    if _shared:
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
