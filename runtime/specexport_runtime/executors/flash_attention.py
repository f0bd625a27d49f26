"""Whether ONNX Runtime's attention on the CPU may go through the cache in tiles."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_lock = threading.Lock()


@contextmanager
def flash_attention(allowed: bool) -> Iterator[None]:
    """Sessions that are made inside use flash attention, or do not.

    ONNX Runtime has no option for that: a kernel reads an environment variable when its session is made, and keeps what
    it read. The variable is the process's own, so sessions are made one at a time.

    Args:
        allowed: leave the choice to the environment; else without it.
    """
    with _lock:
        before = os.environ.get(_VARIABLE)
        if not allowed:
            os.environ[_VARIABLE] = "1"
        try:
            yield
        finally:
            if not allowed:
                _restore(before)


def _restore(value: str | None) -> None:
    if value is None:
        del os.environ[_VARIABLE]
    else:
        os.environ[_VARIABLE] = value
