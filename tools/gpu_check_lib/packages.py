"""Carrying wheels to a machine without a network: fetched, split into small pieces, joined and installed there."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

CARRY_BYTES = 64 << 20
"""Most that one transfer to the GPU machine holds: the checkout's tracked files, and one folder of pieces."""
SPARE_BYTES = 1 << 20
"""Of that for names, and for files that are edited meanwhile."""
MARK = ".part-"
ROOT = Path(__file__).resolve().parents[2]
WHEELS = (
    "onnxruntime-gpu>=1.31,<1.32", "tensorrt-rtx-cu13-libs>=1.7,<1.8", "tensorrt-rtx-cu13-bindings>=1.7,<1.8",
    "cuda-bindings>=13,<13.5", "cuda-pathfinder>=1,<2", "onnx>=1.23,<1.24", "onnxscript>=0.7,<0.8", "onnx-ir>=1.1,<1.2",
)  # fmt: skip
"""What the checks need beside torch, triton, transformers, tokenizers, safetensors, click, rich and numpy."""
SOURCES = ("tensorrt-rtx-cu13>=1.7,<1.8",)
"""Pure Python packages that an index has as source only: the module ``tensorrt_rtx`` itself is one."""
PYTHON = "3.12"
# pip takes each of these literally: a wheel for an older one is not found by asking for a newer one.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def room_beside(root: Path) -> int:
    """Bytes that a folder of pieces may have beside the tracked files of a checkout.

    Raises:
        ValueError: the checkout alone is too large.
    """
    command = ["git", "-C", str(root), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    tree = sum((root / name).lstat().st_size for name in names if name and (root / name).is_file())
    room = CARRY_BYTES - SPARE_BYTES - tree
    if room < SPARE_BYTES:
        raise ValueError(f"the checkout has {tree / 1e6:.0f} MB of {CARRY_BYTES / 1e6:.0f} that a transfer may hold.")
    return room


def split_file(path: Path, folder: Path, piece_bytes: int) -> list[Path]:
    """Cut a file into pieces ``NAME.part-00``, ``NAME.part-01`` …; the last piece's name ends in the file's hash.

    Args:
        path: the file; left as it is.
        folder: where the pieces go.
        piece_bytes: most bytes of a piece.

    Returns:
        the pieces, in order.
    """
    pieces: list[Path] = []
    digest = hashlib.sha256()
    total = -(-path.stat().st_size // piece_bytes)
    with path.open("rb") as source:
        for number in range(total):
            data = source.read(piece_bytes)
            digest.update(data)
            end = f"-of-{total:02}-{digest.hexdigest()[:16]}" if number == total - 1 else ""
            piece = folder / f"{path.name}{MARK}{number:02}{end}"
            piece.write_bytes(data)
            pieces.append(piece)
    return pieces


class PiecesMissingError(ValueError):
    """Not all pieces of a file are here yet."""


def split_names(folder: Path) -> list[str]:
    """Names of the files that ``folder`` and its subfolders hold pieces of."""
    return sorted({path.name.partition(MARK)[0] for path in folder.rglob(f"*{MARK}*")})


def join_pieces(folder: Path, name: str, target: Path) -> Path:
    """Put a split file together in ``target``, checked against its hash.

    Args:
        folder: it and its subfolders hold the pieces.
        name: of the file.
        target: folder of the joined file.

    Returns:
        the joined file.

    Raises:
        PiecesMissingError: not all are here.
        ValueError: one is altered.
    """
    pieces = sorted(folder.rglob(f"{name}{MARK}*"), key=lambda path: path.name)
    number, _, end = pieces[-1].name.partition(MARK)[2].partition("-of-")
    total, _, expected = end.partition("-")
    if not end or int(number) + 1 != len(pieces):
        needed = int(total) if total else "more"
        raise PiecesMissingError(f"{name}: {len(pieces)} of its pieces are here and {needed} are needed.")
    digest = hashlib.sha256()
    with (target / name).open("wb") as file:
        for piece in pieces:
            data = piece.read_bytes()
            digest.update(data)
            file.write(data)
    if digest.hexdigest()[:16] != expected:
        (target / name).unlink()
        raise ValueError(f"{folder / name}: its pieces are altered; bring them again.")
    return target / name


def download_command(requirements: Seq[str], folder: Path) -> list[str]:
    """The pip command that fetches wheels for the GPU machine, whatever machine this is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    return [*command, *(word for name in PLATFORMS for word in ("--platform", name)), *requirements]


def build_command(requirements: Seq[str], folder: Path) -> list[str]:
    """The pip command that makes wheels of pure Python packages."""
    return [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *requirements]


def sort_into_folders(folder: Path, most_bytes: int) -> list[Path]:
    """Move the files of a folder to ``piece-00``, ``piece-01`` …, of at most so many bytes each; large ones are split.

    Args:
        folder: wheels.
        most_bytes: of the files in one folder.

    Returns:
        the files, in their folders.
    """
    for path in sorted(folder.glob("*.whl")):
        if path.stat().st_size > most_bytes:
            split_file(path, folder, most_bytes)
            path.unlink()
    filled: list[int] = []
    moved = []
    sizes = {path: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path.name)):  # the largest first: fewer folders
        fitting = [number for number, size in enumerate(filled) if size + sizes[path] <= most_bytes]
        if not fitting:
            filled.append(0)
        number = fitting[0] if fitting else len(filled) - 1
        filled[number] += sizes[path]
        place = folder / f"piece-{number:02}"
        place.mkdir(exist_ok=True)
        moved.append(path.rename(place / path.name))
    return sorted(moved)


def pack(
    folder: Path, requirements: Seq[str] = WHEELS, sources: Seq[str] = SOURCES, *, root: Path = ROOT
) -> list[Path]:
    """Fetch the wheels, in folders that can be carried one at a time. Needs an index.

    Args:
        folder: where they go; made.
        requirements: wheels to fetch.
        sources: what to build wheels of.
        root: the checkout that is carried too.

    Returns:
        the files to carry; what pip could not get is not among them, and pip has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One by one: what cannot be had must not keep the rest away.
    commands = {requirement: download_command([requirement], folder) for requirement in requirements}
    commands |= {requirement: build_command([requirement], folder) for requirement in sources}
    for requirement, command in commands.items():
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            print(f"{requirement} could not be fetched; its checks will say that it is missing.", file=sys.stderr)
    return sort_into_folders(folder, room_beside(root))


class Installed(NamedTuple):
    """What came of installing carried wheels.

    Attributes:
        site: the folder for ``PYTHONPATH``.
        waiting: wheels of which pieces are still to be brought.
        problems: what went wrong; empty if nothing did.
    """

    site: Path
    waiting: list[str]
    problems: list[str]


def install(folder: Path, work: Path) -> Installed:
    """Join and install the wheels of a folder, each by itself, into ``work/site``.

    Args:
        folder: wheels and pieces of wheels.
        work: the work folder.
    """
    found = Installed(work / "site", [], [])
    whole = work / "wheels"
    for place in (found.site, whole):
        place.mkdir(parents=True, exist_ok=True)
    wheels = [*sorted(folder.rglob("*.whl")), *(folder / name for name in split_names(folder))]
    for wheel in wheels:
        if _is_installed(wheel, found.site):
            continue
        try:
            unpack(wheel if wheel.is_file() else join_pieces(folder, wheel.name, whole), found.site)
        except PiecesMissingError as error:
            found.waiting.append(str(error))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            found.problems.append(f"{wheel.name}: {error}")
    return found


def unpack(wheel: Path, site: Path) -> None:
    """Install a wheel by unpacking it.

    ``pip install --target`` would take a wheel's folder away where the next one has it too (``cuda`` is shared by
    several), and needs all wheels to be good at once.

    Args:
        wheel: the file.
        site: a folder of ``PYTHONPATH``.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read, or the folder not be written.
    """
    name, version = wheel.name.split("-")[:2]
    data, info = f"{name}-{version}.data/", f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        # The metadata last: it says that everything is there.
        for member in sorted(archive.infolist(), key=lambda member: member.filename.startswith(info)):
            if member.filename.startswith(data):
                kind, _, rest = member.filename.removeprefix(data).partition("/")
                if kind not in ("purelib", "platlib") or not rest:
                    continue  # scripts and headers
                member.filename = rest
            archive.extract(member, site)


def _is_installed(wheel: Path, site: Path) -> bool:
    """Whether an earlier run installed this very wheel: its name and version have their record."""
    name, version = wheel.name.split("-")[:2]
    return (site / f"{name}-{version}.dist-info" / "RECORD").is_file()
