"""Loading ``tokenizer.json``: at once, or on a separate thread after the engine was opened.

A vocabulary of 262,144 takes 0.6 s to parse. Opening an engine fills memory too: side by side both gain nothing.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specexport_runtime.errors import BundleError
from specexport_runtime.machine import return_freed_memory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TWIN_MARK = "\ufdd0"
"""Ends the names of tokens whose text another one has too, and no other's; the decoder drops it."""
_CHANCES = ("dropout", "alpha")


def load_tokenizer(path: Path, *, background: bool = False) -> "Tokenizer":
    """Load ``tokenizer.json``; BundleError if it cannot be read.

    With ``background`` it returns once the file is read; :func:`start_loading` or the first use starts the thread that
    parses it, and the use raises.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}).", "build it again.") from error
    return cast("Tokenizer", _BackgroundTokenizer(path, data)) if background else _load(path, data)


def start_loading(tokenizer: "Tokenizer") -> None:
    """Start the thread of a tokenizer that loads in the background; does nothing to any other."""
    if isinstance(tokenizer, _BackgroundTokenizer):
        tokenizer.start()


def disable_truncation(tokenizer: "Tokenizer") -> None:
    """Take away what cuts texts, fills them up, or draws among readings: each text is read whole, always alike."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for chance in _CHANCES:
        if getattr(tokenizer.model, chance, None) is not None:
            setattr(tokenizer.model, chance, None)


def make_whole_text_tokenizer(tokenizer: "Tokenizer") -> "Tokenizer":
    """A caller's tokenizer, or where it would not read texts whole (see :func:`disable_truncation`), a copy that does."""
    if isinstance(tokenizer, _BackgroundTokenizer):
        return tokenizer
    settings = (tokenizer.truncation, tokenizer.padding, *(getattr(tokenizer.model, name, None) for name in _CHANCES))
    if all(setting is None for setting in settings):
        return tokenizer
    copy = type(tokenizer).from_str(tokenizer.to_str())
    disable_truncation(copy)
    return copy


def _load(path: Path, data: bytes) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise BundleError(f"{path} cannot be read: {error}", "build it again.") from error
    disable_truncation(tokenizer)
    return_freed_memory()  # of 300 MB that parsing a large vocabulary takes, 200 are free afterwards
    return tokenizer


class _BackgroundTokenizer:
    """Stands for a tokenizer that a thread is loading; every attribute is the tokenizer's."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._given = path, data
        self._lock = threading.Lock()
        self._future: Future[Tokenizer] | None = None

    def start(self) -> "Future[Tokenizer]":
        with self._lock:
            if self._future is None:
                pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
                self._future = pool.submit(_load, *self._given)
                del self._given
                pool.shutdown(wait=False)
            return self._future

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copying and pickling ask for these before __init__
        return getattr(self.start().result(), name)
