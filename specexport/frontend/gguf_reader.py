"""One reading of a GGUF file's header.

The header holds the vocabulary and takes seconds to parse, and transformers parses it four times: for the configuration
(twice), the tokenizer and the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError


def open_reader(source: Source) -> Any:
    """A ``gguf.GGUFReader`` of a GGUF file, which is mapped and not read; None for other checkpoints.

    Raises:
        CheckpointError: the file is damaged.
    """
    if source.gguf_file is None:
        return None
    import gguf

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf is not followed
        """Reads through a plain array: views of a ``numpy.memmap`` cost twice as much."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    try:
        return PlainReader(source.folder / source.gguf_file)
    except Exception as error:  # whatever a parser of binary data stumbles over
        raise CheckpointError(
            f"{source.name} is no readable GGUF file ({type(error).__name__}: {str(error)[:200]}).",
            "fetch or convert the checkpoint again.",
        ) from error


@contextmanager
def shared(source: Source, reader: Any) -> Iterator[None]:
    """While it lasts, whoever opens the source's file through ``gguf`` gets ``reader``; nothing changes without one."""
    if reader is None:
        yield
        return
    import gguf

    opens, path = gguf.GGUFReader, (source.folder / str(source.gguf_file)).resolve()

    def same(wanted: Any, *args: Any, **named: Any) -> Any:
        return reader if not args and not named and Path(wanted).resolve() == path else opens(wanted, *args, **named)

    gguf.GGUFReader = same
    try:
        yield
    finally:
        gguf.GGUFReader = opens
