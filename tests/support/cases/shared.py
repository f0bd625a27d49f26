"""What takes long to make: made once a session, shared by all workers, and left as it was."""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RECORD = ".made"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``: the workers of pytest-xdist are separate processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[], object]) -> Path:
    """``folder``, which ``make`` writes for the first test that asks. Read only: copy it to change it."""
    with locked(folder.with_name(f"{folder.name}.lock")):
        record = folder.with_name(f"{folder.name}{_RECORD}")
        if not record.is_file():
            make()
            record.write_text(digest_of(folder))
    return folder


def changed_since(session_dir: Path) -> list[str]:
    """Names of what was made once in a session's folder and is no longer what it was."""
    records = sorted(session_dir.glob(f"*{_RECORD}"))
    folders = {record: record.with_name(record.name.removesuffix(_RECORD)) for record in records}
    return [folder.name for record, folder in folders.items() if digest_of(folder) != record.read_text()]


def digest_of(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder)} ".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
