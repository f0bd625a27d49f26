"""Single files that appear complete or not at all. Imports the standard library and the error tree only."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from specexport_runtime.errors import UserInputError


def check_writable(path: Path) -> None:
    """Refuse a place that no file can be written to, before the work starts.

    Raises:
        UserInputError: it is a folder, or its folder is missing or cannot be written to.
    """
    if path.is_dir():
        raise UserInputError(f"{path} is a folder.", "name a file.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserInputError(f"{path} cannot be written: its folder is missing or closed.", "choose another place.")


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file in one step: a temporary file beside it, then rename.

    Args:
        path: the file; replaced if it exists.
        write: writes to the path it is given, which ends like ``path``.

    Raises:
        UserInputError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserInputError(f"{path} cannot be written ({error.strerror}).", "choose another place.") from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            temporary.unlink()
