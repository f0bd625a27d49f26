"""Kept texts in files, for when no row has them any more.

::

    DIR/secret                              random bytes, which key all hashes here
    DIR/<beginning>-<tokens>-<text>.npz     header (JSON), token ids, and what the row had, model by model

The name says for whom a file is: ``beginning`` is a hash of the engine, of who may go on from the text, and of its
first tokens. Without the secret no name tells of a key or a text.

Several processes may share a folder: a file comes with a rename, and never changes. What is damaged is removed.
"""

import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specexport_runtime.decoding.prefixes import WORTH_WAITING, count_common
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.batch import RowCopy
from specexport_runtime.user_cache import is_private, private_folder, replace_file

T = TypeVar("T")
Scope = tuple[str, int | None]
"""Who may go on from a text, and with which adapter."""

MIN_STORED = WORTH_WAITING
"""Tokens of a text that is worth a file, and that a file must save a request."""
MAX_COMPARED = 1024
"""Files of one beginning that are looked into, the newest ones: a millisecond each, the first time."""
_SCHEMA, _SECRET_BYTES = "specexport.prefix/1", 32
_NAME = re.compile(r"[0-9a-f]{32}-\d{1,9}-[0-9a-f]{32}\.npz")
_HALF = re.compile(r"\.([0-9a-f]{32}-.*\.npz|secret)\..*\.tmp")
_STALE_S = 3600.0  # what was half written so long ago is nobody's any more
_log = logging.getLogger(__name__)


class StoredText(NamedTuple):
    """A kept text without a row."""

    tokens: Int64Array
    rows: Sequence[RowCopy]  # of the target, then of each model that has a cache of its own


class PrefixFolder:
    """The texts of one engine in a folder; InvalidRequestError if it cannot be written to, or others could."""

    def __init__(self, path: Path, limit: int, engine: str) -> None:
        self._path, self._limit = path.absolute(), limit  # bytes of all files
        self._engine = engine.encode()  # all that decides about bits
        self._known: dict[str, list[str]] = {}  # names by beginning, the newest first; replaced as a whole
        self._heads: dict[str, tuple[int, Int64Array]] = {}  # of files that were looked into: least tokens, and all
        try:
            self._secret = _secret_in(private_folder(self._path))
            self._make_room(0)
        except OSError as error:
            raise InvalidRequestError(
                f"prefix_cache_dir {path} cannot be used: {error.strerror or error}.",
                "give a folder of your own, which nobody else may write to.",
            ) from None

    def names(self, scope: Scope | None, tokens: Int64Array) -> list[str]:
        """Files that have the first tokens of a text, ``MIN_STORED``; no file is asked."""
        return self._known.get(self._beginning(scope, tokens), [])[:MAX_COMPARED]

    def compare(self, names: Sequence[str], tokens: Int64Array) -> list[tuple[int, str]]:
        """How many of a text's tokens each file has that it can go on from, most first; the first counts as used."""
        found = []
        for name in names:
            if name not in self._heads and (head := self._look_into(name, lambda _, *head: head)):
                self._heads[name] = max(head[0]["rows"][0][1:3]), head[1]
            least, known = self._heads.get(name, (1, tokens[:0]))
            if (common := count_common(tokens, known)) >= max(least, 1):
                found.append((common, name))
        found.sort(reverse=True)
        while found:
            try:
                os.utime(self._path / found[0][1])
                break
            except OSError:  # another process removed it
                self.remove(found.pop(0)[1])
        return found

    def read(self, name: str) -> StoredText | None:
        """A whole file; None if it is damaged or gone."""
        return self._look_into(name, self._whole)

    def write(self, scope: Scope, text: StoredText) -> int:
        """Write a text to a file; its bytes, 0 if it is larger than the folder may be. OSError if it fails."""
        arrays = [text.tokens, *(each for row in text.rows for each in row.arrays)]
        size = sum(each.nbytes for each in arrays)
        if size > self._limit:
            return 0
        name = f"{self._beginning(scope, text.tokens)}-{len(text.tokens)}-{self._hash(text.tokens)}.npz"
        rows = [[*row[:3], len(row.arrays)] for row in text.rows]
        head = json.dumps({"schema": _SCHEMA, "name": name, "rows": rows, "hash": self._hash(*arrays)}).encode()
        self._make_room(size)
        replace_file(self._path / name, lambda file: np.savez(file, np.frombuffer(head, np.uint8), *arrays))
        self._make_room(0)
        return size

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._heads.pop(name, None)
        with suppress(OSError):
            os.unlink(self._path / name)

    def _beginning(self, scope: Scope | None, tokens: Int64Array) -> str:
        return self._hash(self._engine, json.dumps(scope).encode(), tokens[:MIN_STORED])

    def _hash(self, *parts: Any) -> str:
        made = blake2b(key=self._secret, digest_size=16)
        for part in parts:
            made.update(len(part).to_bytes(8, "little"))
            made.update(part)
        return made.hexdigest()

    def _look_into(self, name: str, use: Callable[[Any, Any, Int64Array], T]) -> T | None:
        """What ``use`` makes of a file, its header and tokens; None if it is gone, or damaged: then it is removed."""
        path = self._path / name
        try:
            with path.open("rb") as file:
                if not is_private(os.fstat(file.fileno())):
                    raise ValueError("others may have written it")
                with np.load(file, allow_pickle=False) as data:
                    head, tokens = json.loads(data["arr_0"].tobytes()), data["arr_1"]
                    if (head["schema"], head["name"], len(tokens)) != (_SCHEMA, name, num_tokens(name)):
                        raise ValueError("it is of another text")
                    return use(data, head, tokens)
        except (OSError, MemoryError):
            pass
        except Exception as error:  # whatever numpy, zipfile and json make of bytes
            _log.warning("A kept prefix is damaged (%s), and is removed: %s", error, path)
            self.remove(name)
        return None

    def _whole(self, data: Any, head: Any, tokens: Int64Array) -> StoredText:
        arrays = [data[f"arr_{i}"] for i in range(2, len(data.files))]
        if self._hash(tokens, *arrays) != head["hash"]:
            raise ValueError("its hash is another")
        rest = iter(arrays)
        rows = [RowCopy(n, floor, state_len, list(islice(rest, count))) for n, floor, state_len, count in head["rows"]]
        return StoredText(tokens, rows)

    def _make_room(self, size: int) -> None:
        """See what is there, and remove what was used least recently until so many bytes fit."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(OSError):  # another process may remove files too
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name):
                        found.append((status.st_mtime_ns, entry.name, status.st_size))
                    elif _HALF.fullmatch(entry.name) and time.time() - status.st_mtime > _STALE_S:
                        self.remove(entry.name)
        known: dict[str, list[str]] = {}
        for _, name, each in sorted(found, reverse=True):
            size += each
            if size > self._limit:
                self.remove(name)
            else:
                known.setdefault(name.partition("-")[0], []).append(name)
        self._known = known
        self._heads = {name: self._heads[name] for _, name, _ in found if name in self._heads}


def num_tokens(name: str) -> int:
    """Tokens of the text in a file."""
    return int(name.split("-")[1])


def _secret_in(folder: Path) -> bytes:
    """The folder's secret, made if it has none; OSError if it is damaged, or others could have read it."""
    path = folder / "secret"
    if not path.exists():
        _make_secret(path)
    known, status = path.read_bytes(), path.stat()
    if len(known) != _SECRET_BYTES or not is_private(status) or (os.name == "posix" and status.st_mode & 0o077):
        raise PermissionError(0, "its file 'secret' is damaged, or others may read it: remove that file")
    return known


def _make_secret(path: Path) -> None:
    """Write a new secret; one that another engine wrote meanwhile stays, as its files have names by that."""
    handle, made = tempfile.mkstemp(prefix=".secret.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        try:
            os.link(made, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, path)
    finally:
        with suppress(OSError):
            os.unlink(made)
