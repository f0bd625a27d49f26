"""Built engines kept between builds, found by a hash of everything that decides them.

::

    <cache folder>/<key>/entry.json  tokenizer.json  model.onnx  model.onnx.data

Files are copied in and out (sharing disk blocks where the file system can), never hard-linked: a bundle altered in
place must not change the cache. An entry is checked by hash whenever it is used; a damaged one is dropped and built
again. The hashes lie beside it, so a folder that others may write to is not used. The cache may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from specexport.atomic import clone_file, new_folder, remove_leftovers
from specexport.compile.built import TOKENIZER_NAME, BuiltModel
from specexport.disk import free_space, tree_size
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.errors import SpecexportError
from specexport_runtime.user_cache import cache_root, is_private, warn_unwritable

DEFAULT_MAX_BYTES = 20 * 10**9
ENTRY_NAME = "entry.json"
_KEY = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """The runtime's: ``SPECEXPORT_CACHE_DIR``, else ``specexport`` in the platform's cache folder."""
    return cache_root()


def open_cache() -> "EngineCache | None":
    """The cache in its usual place; None, after a warning, where there is no home folder to have it in."""
    try:
        return EngineCache()
    except RuntimeError as error:
        warn_unwritable(error)
        return None


class EngineCache:
    """The stage cache of ``specexport build``: above ``max_bytes`` the least recently used entries go."""

    def __init__(self, folder: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.folder = (folder or cache_folder()) / "engines"
        self.max_bytes = max_bytes

    def restore(self, key: str, destination: Path) -> BuiltModel | None:
        """Copy and check an entry's engine files in ``destination``, which is made; None if there is no sound entry."""
        if not self._is_trusted():
            return None
        source = self.folder / key
        built = _read_entry(source)
        if built is not None:
            destination.mkdir(parents=True)
            try:
                for name in built.files:
                    clone_file(source / name, destination / name)
                if hash_files(destination, built.files) == dict(built.files):
                    with contextlib.suppress(OSError):  # a read-only cache still serves
                        os.utime(source / ENTRY_NAME)
                    return built
            except FileNotFoundError:
                pass  # a file of the entry is gone: as good as damaged
            shutil.rmtree(destination)
        shutil.rmtree(source, ignore_errors=True)
        return None

    def store(self, key: str, built: BuiltModel, engine_folder: Path) -> bool:
        """Keep an engine whose files are in ``engine_folder``; False if it could not be, which fails no build."""
        size = sum(entry.size for entry in built.files.values()) + len(built.tokenizer_json)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_trusted():
                return False
            if size > self.max_bytes or size > free_space(self.folder) // 2:
                return False
            if (self.folder / key).exists():
                return True
            with new_folder(self.folder / key, sync=False) as folder:
                for name in built.files:
                    clone_file(engine_folder / name, folder / name)
                _write_entry(folder, built)
            self.prune(keep=key)
        except (OSError, SpecexportError):
            return False
        return True

    def prune(self, keep: str | None = None) -> list[str]:
        """Remove leftovers, then entries used least recently, but ``keep``, until the rest fits; keys of what went."""
        entries: list[tuple[float, int, str]] = []
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder.name.startswith("."):
                remove_leftovers(self.folder / folder.name[1:].partition(".")[0])
            elif _KEY.fullmatch(folder.name) and (folder / ENTRY_NAME).is_file():
                entries.append(((folder / ENTRY_NAME).stat().st_mtime, tree_size(folder), folder.name))
        total = sum(size for _, size, _ in entries)
        removed = []
        for _, size, key in sorted(entries):
            if total > self.max_bytes and key != keep:
                shutil.rmtree(self.folder / key, ignore_errors=True)
                total -= size
                removed.append(key)
        return removed

    def _is_trusted(self) -> bool:
        """Whether the folder is there and only this user can have written to it."""
        try:
            trusted = is_private(self.folder.stat())
        except OSError:
            return False
        if not trusted:
            warn_unwritable(PermissionError(0, f"{self.folder} belongs to somebody else, or others may write to it"))
        return trusted


def _write_entry(folder: Path, built: BuiltModel) -> None:
    (folder / TOKENIZER_NAME).write_bytes(built.tokenizer_json)
    body = json.dumps(built.to_json(), sort_keys=True)
    digest = _digest(body, built.tokenizer_json)
    (folder / ENTRY_NAME).write_text(json.dumps({"sha256": digest, "body": body}), encoding="utf-8")


def _read_entry(folder: Path) -> BuiltModel | None:
    try:
        data: dict[str, Any] = json.loads((folder / ENTRY_NAME).read_text(encoding="utf-8"))
        tokenizer_json = (folder / TOKENIZER_NAME).read_bytes()
        if data["sha256"] != _digest(data["body"], tokenizer_json):
            return None
        return BuiltModel.from_json(json.loads(data["body"]), tokenizer_json)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(body: str, tokenizer_json: bytes) -> str:
    return hashlib.sha256(body.encode() + tokenizer_json).hexdigest()
