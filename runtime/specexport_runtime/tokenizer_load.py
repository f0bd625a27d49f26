"""Loading ``tokenizer.json``: at once, or on a thread of its own while the engines open.

A vocabulary of 262,144 takes 0.6 s to parse, as long as opening an engine of 1 GB. Imports tokenizers when it loads.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specexport_runtime.errors import BundleError
from specexport_runtime.executors.ort_session import return_freed_memory

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(path: Path, *, background: bool = False) -> "Tokenizer":
    """Load a tokenizer.

    Args:
        path: ``tokenizer.json``.
        background: return at once; the first use waits until it is loaded. For a file that is known to be right: what
            is wrong with it shows at the first use.

    Raises:
        BundleError: the file cannot be read.
    """
    return cast("Tokenizer", _BackgroundTokenizer(path)) if background else _load(path)


def _load(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise BundleError(f"{path} cannot be read: {error}", "build it again.") from error
    return_freed_memory()  # of 300 MB that parsing a large vocabulary takes, 200 are free afterwards
    return tokenizer


class _BackgroundTokenizer:
    """Stands for a tokenizer that a thread is loading; every attribute is the tokenizer's."""

    def __init__(self, path: Path) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._future = pool.submit(_load, path)
        pool.shutdown(wait=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future.result(), name)
