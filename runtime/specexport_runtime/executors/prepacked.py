"""Engines with packed weights in the user's cache, mapped by every session and process that opens them.

::

    <cache>/prepacked/<key>/record.json  model.onnx  model.onnx.data      key: engine, CPU, onnxruntime version

ONNX Runtime keeps a packed copy of the weights in each session's own memory. Written to a file once, it maps them
instead. The file depends on the processor and the onnxruntime version, so both are in its key, and it is made on the
machine, at the first load, never shipped. It holds the weights twice, plain and packed; only the packed ones (and the
embedding) stay in use. Files beyond ``SPECEXPORT_CACHE_GB`` (20 unless set, 0 keeps none) are removed, the least
recently used first; ``SPECEXPORT_PREPACKED=0`` turns all of it off. Imports the standard library only.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.files import FileEntry, check_files, sha256_file
from specexport_runtime.errors import BundleError
from specexport_runtime.machine import packing_key
from specexport_runtime.user_cache import cache_folder, is_private, read_json, warn_once, warn_unwritable, write_json

KIND = "prepacked"
GRAPH_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"
RECORD_NAME = "record.json"
SWITCH_VARIABLE = "SPECEXPORT_PREPACKED"
LIMIT_VARIABLE = "SPECEXPORT_CACHE_GB"
DEFAULT_LIMIT_GB = 20.0
MIN_WEIGHT_BYTES = 16_000_000
"""Smaller engines pack in under 20 ms and save less memory than a file is worth."""
SIZE_FACTOR = 2.1
"""File size over the bundle's weights: each weight plain and packed."""
LOCK_SECONDS = 120.0
LEFTOVER_SECONDS = 3600.0


def is_enabled() -> bool:
    """Whether ``SPECEXPORT_PREPACKED`` leaves the prepacked files on."""
    return os.environ.get(SWITCH_VARIABLE, "1") != "0"


def limit_bytes() -> int:
    """Bytes that all prepacked files together may take: ``SPECEXPORT_CACHE_GB``."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = float(text) if text else DEFAULT_LIMIT_GB
        return max(0, int(limit * 1e9))
    except (ValueError, OverflowError):  # no number; not a number, or infinite
        warn_once("cache limit", "%s=%s is no number of gigabytes; %g is used.", LIMIT_VARIABLE, text, DEFAULT_LIMIT_GB)
        return int(DEFAULT_LIMIT_GB * 1e9)


@dataclass(frozen=True)
class PrepackedEngine:
    """The prepacked file of one engine on this machine.

    Attributes:
        engine_hash: hash of the graph and all its weights.
        weight_bytes: size of its weights in the bundle.
    """

    engine_hash: str
    weight_bytes: int

    @property
    def key(self) -> str:
        """Name of its folder: by engine, processor, platform and onnxruntime version."""
        return hashlib.sha256(f"{self.engine_hash} {packing_key()}".encode()).hexdigest()

    def load(self, *, write: Callable[[Path], None], read: Callable[[Path], Any]) -> Any | None:
        """Open the prepacked file, making it first where it is missing or damaged.

        Args:
            write: writes :data:`GRAPH_NAME` and :data:`DATA_NAME` into the folder it gets.
            read: opens them.

        Returns:
            what ``read`` returned; None where the engine is too small, the cache cannot be used (said once a process),
            or the file cannot be made or opened.
        """
        if not is_enabled() or self.weight_bytes < MIN_WEIGHT_BYTES or not limit_bytes():
            return None
        store = cache_folder(KIND, writable=False)
        if store is not None and (session := self._open(store / self.key, read)) is not None:
            return session
        store = cache_folder(KIND)
        if store is None:
            return None
        try:
            with _locked(store / f"{self.key}.lock"):
                session = self._open(store / self.key, read)  # another process may have made it meanwhile
                if session is not None or not self._make(store, write):
                    return session
                return self._open(store / self.key, read)
        except OSError as error:
            warn_unwritable(error)
            return None

    def _open(self, folder: Path, read: Callable[[Path], Any]) -> Any | None:
        record = read_json(folder / RECORD_NAME)
        if record is None or not is_private(folder.stat()):
            return None
        try:
            files = {name: FileEntry(**record["files"][name]) for name in (GRAPH_NAME, DATA_NAME)}
            if record["packing_key"] != packing_key() or record["engine_hash"] != self.engine_hash:
                return None
            check_files(folder, files, remember=True)
            session = read(folder)
        except (BundleError, KeyError, TypeError, OSError):
            return None  # damaged: it is made again
        except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
            warn_once(f"prepacked {self.key}", "%s cannot be opened (%s): it is made again.", folder, error)
            return None
        with contextlib.suppress(OSError):  # a read-only cache still serves
            os.utime(folder / RECORD_NAME)
        return session

    def _make(self, store: Path, write: Callable[[Path], None]) -> bool:
        """Write the file, under a temporary name until it is complete. Raises OSError."""
        shutil.rmtree(store / self.key, ignore_errors=True)
        needed = int(self.weight_bytes * SIZE_FACTOR)
        if needed > limit_bytes():
            warn_once(
                "cache limit", "A prepacked file of %.1f GB exceeds %s: none is made.", needed / 1e9, LIMIT_VARIABLE
            )
            return False
        prune(store, limit_bytes() - needed)
        if needed > shutil.disk_usage(store).free // 2:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB would take more than half of the free space")
        folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=store))
        try:
            write(folder)
            files = {}
            for name in (GRAPH_NAME, DATA_NAME):
                os.chmod(folder / name, 0o600)
                files[name] = {"sha256": sha256_file(folder / name), "size": (folder / name).stat().st_size}
            record = {"packing_key": packing_key(), "engine_hash": self.engine_hash, "files": files}
            if write_json(folder / RECORD_NAME, record):
                os.replace(folder, store / self.key)
                return True
        except OSError:
            raise
        except Exception as error:  # onnxruntime raises its own types: a full disk, or an engine it cannot save
            warn_once(f"prepacked {self.key}", "No prepacked file is made in %s: %s", store, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return False


def prune(store: Path, max_bytes: int) -> list[str]:
    """Remove what killed processes left, then the least recently used files until the rest fits.

    A process that has mapped a removed file keeps it until it ends.

    Args:
        store: folder of the prepacked files.
        max_bytes: what may stay.

    Returns:
        keys that were removed.
    """
    entries: list[tuple[float, int, Path]] = []
    for folder in store.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            if folder.is_dir():
                inside = [path.stat() for path in folder.iterdir()]
                newest = max((status.st_mtime for status in inside), default=folder.stat().st_mtime)
                if not folder.name.startswith(".tmp-"):
                    entries.append((newest, sum(status.st_size for status in inside), folder))
                elif newest < time.time() - LEFTOVER_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
    total = sum(size for _, size, _ in entries)
    removed = []
    for _, size, folder in sorted(entries):
        if total > max_bytes:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            removed.append(folder.name)
    return removed


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process after another make a file; past :data:`LOCK_SECONDS`, or without locks, they all make it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield  # closing the file ends the lock
