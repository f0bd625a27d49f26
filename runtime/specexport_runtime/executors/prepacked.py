"""Engines with packed weights in the user's cache, mapped by every session and process that opens them.

::

    <cache>/prepacked/<key>/record.json  model.onnx  model.onnx.data      key: engine, CPU, onnxruntime version

ONNX Runtime keeps a packed copy of the weights in each session's own memory. Written to a file once, it maps them
instead. The file depends on the processor and the onnxruntime version, so both are in its key, and it is made on the
machine, at the first load, never shipped. It holds the weights twice, plain and packed; only the packed ones (and the
embedding) stay in use. A file is kept only if it was proved: a session of it gave the same logits, bit for bit, as one
that packs for itself. Otherwise a record without files stays in its place, so that it is not made again. Files beyond
``SPECEXPORT_CACHE_GB`` (20 unless set, 0 keeps none) are removed, the least recently used first;
``SPECEXPORT_PREPACKED=0`` turns all of it off. Imports the standard library only.
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
REFUSED = "refused"
"""Field of a record that says why there are no files beside it."""
SWITCH_VARIABLE = "SPECEXPORT_PREPACKED"
LIMIT_VARIABLE = "SPECEXPORT_CACHE_GB"
DEFAULT_LIMIT_GB = 20.0
MIN_WEIGHT_BYTES = 16_000_000
"""Smaller engines pack in under 20 ms and save less memory than a file is worth."""
SIZE_FACTOR = 2.1
"""File size over the bundle's weights: each weight plain and packed."""
MAX_WIDTH = 1000
"""Widths from a record are proved below it only: it may hold anything."""
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


class UnprovenError(Exception):
    """A prepacked file does not compute what its engine does, or cannot be opened; says why."""


@dataclass(frozen=True)
class PrepackedEngine:
    """The prepacked file of one engine on this machine.

    Attributes:
        engine_hash: hash of the graph and all its weights.
        weight_bytes: size of its weights in the bundle.
        widths: tokens of the steps that the file must have been proved at.
    """

    engine_hash: str
    weight_bytes: int
    widths: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Name of its folder: by engine, processor, platform and onnxruntime version."""
        return hashlib.sha256(f"{self.engine_hash} {packing_key()}".encode()).hexdigest()

    def load(
        self,
        *,
        write: Callable[[Path], None],
        prove: Callable[[Path, tuple[int, ...]], None],
        read: Callable[[Path], Any],
    ) -> Any | None:
        """Open the prepacked file, making and proving it first where it is missing, damaged or proved at other widths.

        Args:
            write: writes :data:`GRAPH_NAME` and :data:`DATA_NAME` into the folder it gets.
            prove: compares those in a folder with the engine, at steps of the given widths; raises
                :class:`UnprovenError` where they differ.
            read: opens them.

        Returns:
            what ``read`` returned; None where the engine is too small, the cache cannot be used (said once a process),
            or the file cannot be made or opened, or was found to be wrong when it was made (said then).
        """
        if not is_enabled() or self.weight_bytes < MIN_WEIGHT_BYTES or not limit_bytes():
            return None
        store = cache_folder(KIND, writable=False)
        settled, session = (False, None) if store is None else self._open(store / self.key, read)
        if settled:
            return session
        store = cache_folder(KIND)
        if store is None:
            return None
        try:
            with _locked(store / f"{self.key}.lock"):
                settled, session = self._open(store / self.key, read)  # another process may have made it meanwhile
                if not settled and self._make(store, write, prove):
                    _, session = self._open(store / self.key, read)
                return session
        except OSError as error:
            warn_unwritable(error)
            return None

    def _record(self, folder: Path) -> dict[str, Any] | None:
        """What is known of the file in ``folder``; None if it is not this engine's, on this machine."""
        record = read_json(folder / RECORD_NAME)
        try:
            if not isinstance(record, dict) or not is_private(folder.stat()):
                return None
        except OSError:  # another process has removed it
            return None
        mine = (record.get("packing_key"), record.get("engine_hash")) == (packing_key(), self.engine_hash)
        return record if mine else None

    def _all_widths(self, record: dict[str, Any] | None) -> tuple[int, ...]:
        """Widths to prove: also those of another bundle's K, or the two would make the file again in turns."""
        known = None if record is None else record.get("widths")
        given = known if isinstance(known, list) else []
        others = (width for width in given if isinstance(width, int) and 0 < width < MAX_WIDTH)
        return tuple(sorted({*self.widths, *others}))

    def _open(self, folder: Path, read: Callable[[Path], Any]) -> tuple[bool, Any | None]:
        """Whether nothing is to be made, and what ``read`` returned; None if the file was found to be wrong."""
        record = self._record(folder)
        if record is None:
            return False, None
        if REFUSED in record:
            return True, None
        try:
            if not set(self.widths) <= set(record["widths"]):
                return False, None
            files = {name: FileEntry(**record["files"][name]) for name in (GRAPH_NAME, DATA_NAME)}
            check_files(folder, files, remember=True)
            session = read(folder)
        except (BundleError, KeyError, TypeError, OSError):
            return False, None  # damaged, or from before files were proved: it is made again
        except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
            warn_once(f"prepacked {self.key}", "%s cannot be opened (%s): it is made again.", folder, error)
            return False, None
        with contextlib.suppress(OSError):  # a read-only cache still serves
            os.utime(folder / RECORD_NAME)
        return True, session

    def _make(
        self,
        store: Path,
        write: Callable[[Path], None],
        prove: Callable[[Path, tuple[int, ...]], None],
    ) -> bool:
        """Write the file and prove it, under a temporary name until it is complete. Raises OSError."""
        widths = self._all_widths(self._record(store / self.key))
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
            record: dict[str, Any] = {"packing_key": packing_key(), "engine_hash": self.engine_hash, "widths": widths}
            try:
                prove(folder, widths)
            except UnprovenError as error:
                self._refuse(store, folder, record, error)
                return False
            record["files"] = {}
            for name in (GRAPH_NAME, DATA_NAME):
                os.chmod(folder / name, 0o600)
                record["files"][name] = {"sha256": sha256_file(folder / name), "size": (folder / name).stat().st_size}
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

    def _refuse(self, store: Path, folder: Path, record: dict[str, Any], error: UnprovenError) -> None:
        """Leave a record in the place of files that must not be used, and say so."""
        for name in (GRAPH_NAME, DATA_NAME):
            (folder / name).unlink()
        if write_json(folder / RECORD_NAME, {**record, REFUSED: str(error)}):
            os.replace(folder, store / self.key)
        warn_once(
            f"prepacked {self.key}",
            "Packed weights are not kept for this engine: %s. It runs without them, and loads more slowly. "
            "To try again, remove %s.",
            error,
            store / self.key,
        )


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
