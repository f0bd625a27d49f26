"""Bundles in the user's cache, and how one is known again without reading gigabytes.

::

    <cache>/bundles/<id>/built.json    what was asked for, and the state of each file that it was built from
                         <name>/       the bundle
            bundles/.<id>.lock         locked by who builds or removes it; gone otherwise

The id is a hash of what was asked for: places and options, not contents. A file is the same as long as its size, time
of change and inode are; if one is not, a build compares hashes, and builds anew what they say has changed. Engines are
not kept in the build's own cache besides, so each weight lies on the disk once. Imports no compiler stage.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from specexport.atomic import remove_leftovers
from specexport.checkpoint.source import file_state, resolve_source
from specexport_runtime.bundle.held import held, try_lock
from specexport_runtime.bundle.manifest import MANIFEST_NAME, load_manifest
from specexport_runtime.errors import CheckpointError, SpecexportError, UserInputError
from specexport_runtime.user_cache import ROOT_VARIABLE, cache_folder, read_json, replace_file, require_folder

KIND = "bundles"
_RECORD = "built.json"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_ID = re.compile(r"[0-9a-f]{12}")

Files = dict[str, dict[str, list[int]]]
"""Of each role, the state of every file of its checkpoint by path."""


@dataclass(frozen=True)
class BundleSpec:
    """What a bundle is built from; None is the build's default."""

    target: str  # an absolute path, or a hub id
    draft: str | None = None
    quantize: str | None = None
    max_model_len: int | None = None

    @property
    def id(self) -> str:
        """Its folder's name."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The bundle's name: that of the target's folder or file, without what says which part of a file it is."""
        name = Path(self.target).name
        name = _PART.sub("", name[:-5]) if name.lower().endswith(".gguf") else name
        return "-".join(name.split()) or "model"

    @property
    def places(self) -> dict[str, str]:
        """The checkpoint of each role."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})


@dataclass(frozen=True)
class CachedBundle:
    """A bundle in the cache."""

    folder: Path
    wanted: BundleSpec
    files: Files
    version: str  # of specexport
    last_used: float  # seconds since the epoch

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.folder / self.wanted.name

    def note_use(self) -> None:
        """It is used now; a read-only cache still serves."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / _RECORD)


class BundleStatus(NamedTuple):
    """What has become of a bundle since it was built."""

    fault: str | None  # why it must be built again; None if it need not
    gone: list[str]  # checkpoints that are there no more


def resolve_checkpoint_path(given: str) -> str:
    """An absolute path where there is such a file or folder, or was when something was built of it; else a hub id."""
    path = os.path.abspath(os.path.expanduser(given))
    if os.path.lexists(path) or given.startswith((".", "/", "~")) or given.lower().endswith(".gguf"):
        return path
    known = any(path in kept.wanted.places.values() for kept in list_cached_bundles())
    return path if known else given


def read_cached_bundle(folder: Path) -> CachedBundle | None:
    """What is kept in ``bundles/<id>``; None if nothing is, or it is damaged."""
    data: Any = read_json(folder / _RECORD)
    try:
        used = (folder / _RECORD).stat().st_mtime
        return CachedBundle(folder, BundleSpec(**data["wanted"]), data["files"], data["version"], used)
    except (TypeError, KeyError, OSError):
        return None


def find_cached_bundle(wanted: BundleSpec) -> CachedBundle | None:
    """The bundle that was built as wanted; None if there is none."""
    folder = cache_folder(KIND, writable=False)
    return None if folder is None else read_cached_bundle(folder / wanted.id)


def list_cached_bundles() -> list[CachedBundle]:
    """Every bundle of the cache, the last used first."""
    found = [read_cached_bundle(each) for each in _list_bundle_folders(cache_folder(KIND, writable=False))]
    return sorted((kept for kept in found if kept is not None), key=lambda kept: -kept.last_used)


def _list_bundle_folders(folder: Path | None) -> list[Path]:
    return [] if folder is None else [each for each in folder.iterdir() if _ID.fullmatch(each.name)]


def check_cached_bundle(kept: CachedBundle) -> BundleStatus:
    """Compare a bundle with what it was built from, and with this release, without reading weights."""
    try:
        files = load_manifest(kept.bundle).files
        whole = all((kept.bundle / name).stat().st_size == entry.size for name, entry in files.items())
    except (SpecexportError, OSError):
        whole = False
    gone, changed = [], []
    for role, place in kept.wanted.places.items():
        before = kept.files.get(role, {})
        if os.path.isabs(place) and os.path.exists(place):
            now = find_file_states(place)
        elif all(map(os.path.exists, before)):  # of a hub id: no network is asked
            now = {path: list(file_state(Path(path))) for path in before}
        else:
            gone.append(place)
            continue
        if now != before:
            changed.append(place)
    if not whole:
        return BundleStatus("the bundle in the cache is damaged", gone)
    if changed:
        return BundleStatus(f"{short(changed[0])} has changed", gone)
    return BundleStatus(
        "it was built by another release" if kept.version != version("specexport") and not gone else None, gone
    )


def find_file_states(place: str) -> dict[str, list[int]]:
    """The state of each file of a checkpoint; fetches it for a hub id. CheckpointError if it cannot be used."""
    path, shown = Path(place), short(place)
    fix = "give a Hugging Face folder, a .gguf file or a hub id."
    if path.is_absolute() and not os.path.lexists(path):
        raise CheckpointError(f"checkpoint {shown}: there is no such folder or file.", fix)
    if path.is_dir() and not os.path.lexists(path / "config.json") and not any(path.glob("*.gguf")):
        if os.path.lexists(path / MANIFEST_NAME):
            raise CheckpointError(f"{shown} is a bundle, and a draft is a checkpoint.", fix)
        raise CheckpointError(
            f"{shown} is not a bundle (it has no {MANIFEST_NAME}), nor a checkpoint (no config.json).", fix
        )
    return {os.path.abspath(path): list(file_state(path)) for path in resolve_source(shown).files}


def short(place: str) -> str:
    """A path as it would be typed: relative to the working folder, if it lies there."""
    inside = os.path.isabs(place) and Path(place).is_relative_to(Path.cwd())
    return os.path.relpath(place) if inside else place


def bundles_folder() -> Path:
    """Where bundles are kept, made if need be; UserInputError where nothing can be written."""
    try:
        return require_folder(KIND)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserInputError(
            f"bundles are built into the user's cache, which cannot be written ({reason}).",
            f"set {ROOT_VARIABLE} to a folder of your own, or choose one with `specexport build … -o FOLDER`.",
        ) from error


def write_record(folder: Path, wanted: BundleSpec, files: Files) -> None:
    """Say what a bundle was built from: from here on it is kept. OSError on a full disk."""
    record = {"wanted": asdict(wanted), "files": files, "version": version("specexport")}
    replace_file(folder / _RECORD, lambda file: file.write(json.dumps(record, indent=1).encode()))


@contextlib.contextmanager
def alone(folder: Path, wait: Callable[[], object] | None = None) -> Iterator[bool | None]:
    """Hold ``bundles/<id>`` alone: after ``wait`` was called while others do, or False without; None without locks."""
    path = folder.with_name(f".{folder.name}.lock")
    while True:
        with path.open("ab") as file:
            taken = try_lock(file.fileno(), alone=True)
            if taken is False:
                if wait is None:
                    yield False
                    return
                import fcntl

                wait()
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # who held it took it away
            try:
                yield taken is not None or None
            finally:
                path.unlink(missing_ok=True)
            return


def remove_cached_bundle(kept: CachedBundle) -> None:
    """Remove a bundle, or raise OSError; engines that run it go on. UserInputError if it is being built."""
    with alone(kept.folder) as is_mine, held(kept.bundle, alone=True):
        if is_mine is False:
            raise UserInputError(f"{kept.wanted.name} is being built just now.", "wait for that, or stop it.")
        (kept.folder / _RECORD).unlink(missing_ok=True)  # what is left is nothing from here on
        shutil.rmtree(kept.folder)


def remove_unfinished_builds() -> None:
    """Remove what builds left that were killed."""
    for folder in _list_bundle_folders(cache_folder(KIND, writable=False)):
        with contextlib.suppress(OSError), alone(folder) as is_mine:
            kept = read_cached_bundle(folder)
            if is_mine and kept is None:
                shutil.rmtree(folder)
            elif is_mine and kept is not None:
                remove_leftovers(kept.bundle)
