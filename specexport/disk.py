"""Room on a disk, and what folders take of it."""

import shutil
from pathlib import Path

from specexport_runtime.errors import UserInputError


def require_disk_space(path: Path, needed: int) -> None:
    """Check that the disk of ``path`` has room for ``needed`` bytes, before long work; UserInputError names both."""
    free = free_space(path)
    if free < needed:
        raise UserInputError(
            f"the disk of {path} is too small: about {format_bytes(needed)} are needed, {format_bytes(free)} are free.",
            "free some space, or choose a folder on another disk.",
        )


def free_space(path: Path) -> int:
    """Bytes free on the disk that holds ``path`` (or will)."""
    folder = path.resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def format_bytes(count: int) -> str:
    """Bytes for a reader: ``1,073,741,824 bytes (1.07 GB)``."""
    if count < 1_000_000:
        return f"{count:,} bytes"
    return f"{count:,} bytes ({count / 1e9:.2f} GB)" if count >= 10**8 else f"{count:,} bytes ({count / 1e6:.1f} MB)"


def tree_size(folder: Path) -> int:
    """Bytes of all files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
