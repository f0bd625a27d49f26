"""Carrying packages to a machine without a network: fetched, cut down to its GPU, packed; joined and unpacked there."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_check_lib.fatbin import keep_architecture

CARRY_BYTES = 64 << 20
"""Most that one transfer to the GPU machine holds: the checkout's tracked files, and one folder of pieces."""
SPARE_BYTES = 4 << 20
"""Of that for names, other carried paths, and files that are edited meanwhile."""
MARK = ".part-"
ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "packages.tar.xz"
WHEELS = (
    "onnxruntime-gpu>=1.31,<1.32", "cuda-bindings>=13,<13.5", "cuda-pathfinder>=1,<2", "onnx>=1.23,<1.24",
    "onnxscript>=0.7,<0.8", "onnx-ir>=1.1,<1.2", "transformers>=5.23,<5.24", "huggingface-hub>=1.31,<2",
)  # fmt: skip
"""What the checks need beside torch, triton, tokenizers, safetensors, click, rich and numpy. The hub is the oldest that
transformers takes: the next one needs packages that the GPU machine lacks."""
RTX_WHEELS = ("tensorrt-rtx-cu13-libs>=1.7,<1.8", "tensorrt-rtx-cu13-bindings>=1.7,<1.8")
RTX_SOURCES = ("tensorrt-rtx-cu13>=1.7,<1.8",)
"""Pure Python packages that an index has as source only: the module ``tensorrt_rtx`` itself is one."""
CUDA_LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
"""The one library whose code for other GPUs is worth leaving out: two thirds of 218 MB."""
UNUSED = ("onnxruntime/capi/libonnxruntime.so*", "onnxruntime/capi/*_tensorrt.so", "onnx/backend/test/data")
"""What no check loads, though packages have it."""
PYTHON = "3.12"
# pip takes each of these literally: a wheel for an older one is not found by asking for a newer one.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def room_beside(root: Path) -> int:
    """Bytes that a folder of pieces may have beside the tracked files of a checkout.

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
    """Cut a file into ``piece-00/NAME.part-00``, ``piece-01/NAME.part-01`` …; the last name ends in the file's hash.

    The pieces, in order, have at most ``piece_bytes`` each and go to ``folder``, from which other pieces of such a file
    are removed.
    """
    for old in folder.rglob(f"{path.name}{MARK}*"):
        old.unlink()
    pieces: list[Path] = []
    digest = hashlib.sha256()
    total = -(-path.stat().st_size // piece_bytes)
    with path.open("rb") as source:
        for number in range(total):
            data = source.read(piece_bytes)
            digest.update(data)
            end = f"-of-{total:02}-{digest.hexdigest()[:16]}" if number == total - 1 else ""
            piece = folder / f"piece-{number:02}" / f"{path.name}{MARK}{number:02}{end}"
            piece.parent.mkdir(parents=True, exist_ok=True)
            piece.write_bytes(data)
            pieces.append(piece)
    return pieces


class PiecesMissingError(ValueError):
    """Not all pieces of a file are here yet."""


def join_pieces(folder: Path, name: str, target: Path) -> Path:
    """Put a split file together in the folder ``target``, checked against its hash; returns the joined file.

    ``folder`` and its subfolders hold the pieces. PiecesMissingError: not all are here. ValueError: there are none, or
    one is altered.
    """
    pieces = sorted(folder.rglob(f"{name}{MARK}*"), key=lambda path: path.name)
    if not pieces:
        raise ValueError(f"{folder} holds no pieces of {name}.")
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


def download_command(requirements: Sequence[str], folder: Path) -> list[str]:
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


def build_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """The pip command that makes wheels of pure Python packages."""
    return [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *requirements]


def pack(
    folder: Path, sm: int, requirements: Sequence[str] = WHEELS, sources: Sequence[str] = (), *, piece_bytes: int
) -> list[Path]:
    """Fetch packages and pack them for one architecture, in pieces that can be carried one at a time. Needs an index.

    Returns the pieces, in ``folder``; what pip could not get is not in them, and pip has said why. ``sm`` is such as
    90; ``sources`` are what to build wheels of. ValueError: nothing could be had, or a library cannot be cut down to
    the architecture.
    """
    with tempfile.TemporaryDirectory() as work:
        wheels, site = (Path(work) / name for name in ("wheels", "site"))
        # One by one: what cannot be had must not keep the rest away.
        commands = {requirement: download_command([requirement], wheels) for requirement in requirements}
        commands |= {requirement: build_command([requirement], wheels) for requirement in sources}
        for requirement, command in commands.items():
            if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
                print(f"{requirement} could not be fetched; its checks will say that it is missing.", file=sys.stderr)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        if not site.is_dir():
            raise ValueError("nothing could be fetched.")
        if (library := site / CUDA_LIBRARY).is_file():
            keep_architecture(library, sm)
        for path in [path for pattern in UNUSED for path in site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        archive = Path(work) / ARCHIVE
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(site, ".")
        return split_file(archive, folder, piece_bytes)


def install(folder: Path, work: Path) -> Path:
    """Join and unpack what :func:`pack` made into ``work/site``, instead of what is there; returns that folder.

    ``folder`` and its subfolders hold the pieces. PiecesMissingError: pieces are still to be brought. OSError,
    ValueError or tarfile.TarError: it cannot be read or written.
    """
    site, new = work / "site", work / "site.new"
    last = max((path.name for path in folder.rglob(f"{ARCHIVE}{MARK}*")), default="")
    if last and (site / last).is_file():
        return site
    work.mkdir(parents=True, exist_ok=True)
    archive = join_pieces(folder, ARCHIVE, work)
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(new, filter="data")
    archive.unlink()
    (new / last).touch()  # says that this very archive is here, whole
    shutil.rmtree(site, ignore_errors=True)
    return new.rename(site)


def unpack(wheel: Path, site: Path) -> None:
    """Install a wheel by unpacking it into a folder of ``PYTHONPATH``.

    ``pip install --target`` would take a wheel's folder away where the next one has it too (``cuda`` is shared by
    several).
    """
    name, version = wheel.name.split("-")[:2]
    data = f"{name}-{version}.data/"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(data):
                kind, _, rest = member.filename.removeprefix(data).partition("/")
                if kind not in ("purelib", "platlib") or not rest:
                    continue  # scripts and headers
                member.filename = rest
            archive.extract(member, site)
