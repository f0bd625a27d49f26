"""Where checkpoints lay when they were built from, by hash: in the user's cache, as no manifest names a path."""

import os
import re
from pathlib import Path

from specexport_runtime.user_cache import cache_folder, read_json, write_json


def remember_place(source: str, sha256: str) -> None:
    """Keep where a checkpoint lies, for ``verify``; a hub id has no place."""
    path = Path(source).expanduser()
    if path.exists() and (folder := cache_folder("checkpoints")) is not None:
        write_json(folder / f"{sha256}.json", os.path.abspath(path))


def find_remembered_place(sha256: str) -> str | None:
    """Where a checkpoint lay when it was built from; None if that is not known. What lies there now may be another."""
    folder = cache_folder("checkpoints", writable=False)
    if folder is None or not re.fullmatch("[0-9a-f]{64}", sha256):
        return None
    place = read_json(folder / f"{sha256}.json")
    return place if isinstance(place, str) else None
