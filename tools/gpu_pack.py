"""Carry packages to a GPU machine without a network: fetched, cut down to its architecture, and unpacked there.

    python tools/gpu_pack.py --sm 90 --out build/wheels        # where there is an index
    python tools/gpu_pack.py --install build/wheels SITE       # on the GPU machine; SITE joins PYTHONPATH

A library's CUDA code for other architectures is overwritten with zeros, which compress to nothing. Section
``.nv_fatbin`` of an ELF file holds containers one after the other, one for each compiled source. A container holds
images: machine code ("cubin") for an architecture, or PTX. CUDA takes the one that fits the GPU, and no other. NVIDIA
documents none of it, so whatever looks different is an error, and nothing is written.
"""

import argparse
import io
import lzma
import mmap
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CARRY_BYTES = 64 << 20
"""Most that one transfer to the GPU machine holds: the checkout's tracked files, and one folder of pieces."""
SPARE_BYTES = 4 << 20
"""Of that for names, other carried paths, and files that are edited meanwhile."""
ROOT = Path(__file__).resolve().parents[1]
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
SECTION = b".nv_fatbin"
CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of the images."""
MAGIC, VERSION = 0xBA55ED50, 1
IMAGE = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code, architecture."""
PTX, CUBIN = 1, 2
ALIGNMENT = 8


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


def split(data: bytes, folder: Path, piece_bytes: int) -> list[Path]:
    """Cut data into ``piece-00/packages-00-of-02``, …, which replace what is in a folder; returns the pieces."""
    for old in folder.glob("piece-*"):
        shutil.rmtree(old)
    total = -(-len(data) // piece_bytes)
    pieces = [folder / f"piece-{i:02}" / f"packages-{i:02}-of-{total:02}" for i in range(total)]
    for i, piece in enumerate(pieces):
        piece.parent.mkdir(parents=True)
        piece.write_bytes(data[i * piece_bytes : (i + 1) * piece_bytes])
    return pieces


def install(folder: Path, site: Path) -> str:
    """Unpack what :func:`pack` made into ``site``, unless it is there; returns what came of it.

    ``folder`` and its subfolders hold the pieces. OSError, EOFError, LZMAError or TarError: they are altered.
    """
    pieces = sorted(folder.rglob("packages-*"), key=lambda path: path.name)
    needed = int(pieces[0].name.rpartition("-")[2]) if pieces else 1
    if site.is_dir():
        return "is there"
    if len(pieces) < needed:
        return f"{len(pieces)} of {needed} pieces are here"
    new = site.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces)), mode="r:xz") as packed:
        packed.extractall(new, filter="data")
    new.rename(site)
    return "installed"


def download_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """The pip command that fetches wheels for the GPU machine, whatever machine this is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [f"--abi={name}" for name in ("cp312", "abi3", "none")]
    return [*command, *(f"--platform={name}" for name in PLATFORMS), *requirements]


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
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz") as packed:
            packed.add(site, ".")
        return split(archive.getvalue(), folder, piece_bytes)


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


class Image(NamedTuple):
    """Code of a container: what it is, its architecture (90), and where it begins and ends in the file."""

    kind: int
    sm: int
    begin: int
    end: int


def keep_architecture(path: Path, sm: int) -> int:
    """Overwrite the code in a library that a GPU would not take; returns the number of bytes that were overwritten.

    Machine code runs on its own architecture and on later ones of its generation: of 80 and 86, a GPU of 8.9 takes 86.
    The ELF file is changed in place; ``sm`` is such as 90. ValueError: it holds no such code, or is laid out in an
    unknown way; it is as it was.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        try:
            containers = list(_containers(data, *_section(data)))
        except (ValueError, struct.error) as error:
            raise ValueError(f"{path}: {error}; its CUDA code cannot be cut down to one architecture.") from error
        unused = [image for images in containers for image in _unused(images, sm)]
        there = {image.sm for images in containers for image in images}
        if not any(_fits(image, sm) for images in containers for image in images):
            raise ValueError(f"{path} has no machine code for sm {sm}; it has {', '.join(map(str, sorted(there)))}.")
        for image in unused:
            data[image.begin : image.end] = bytes(image.end - image.begin)
    return sum(image.end - image.begin for image in unused)


def _fits(image: Image, sm: int) -> bool:
    return image.kind == CUBIN and image.sm // 10 == sm // 10 and image.sm <= sm


def _unused(images: list[Image], sm: int) -> list[Image]:
    """All but the best machine code for a GPU; PTX stays where there is none."""
    best = max((image.sm for image in images if _fits(image, sm)), default=None)
    return [image for image in images if (image.kind, image.sm) != (CUBIN, best) and (image.kind == CUBIN or best)]


def _section(data: mmap.mmap) -> tuple[int, int]:
    """Where the section begins and ends, from the table of sections."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF file of 64 bits, little endian")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_bytes, count, names = struct.unpack_from("<HHH", data, 58)
    entries = [struct.unpack_from("<II16xQQ", data, table + number * entry_bytes) for number in range(count)]
    if names >= count:
        raise ValueError("the table of sections has no names")
    for name, _, begin, size in entries:
        start = entries[names][2] + name
        if data[start : start + len(SECTION) + 1] == SECTION + b"\0":
            if begin + size > len(data):
                raise ValueError(f"section {SECTION.decode()} ends after the file")
            return begin, begin + size
    raise ValueError(f"no section {SECTION.decode()}")


def _containers(data: mmap.mmap, begin: int, end: int) -> Iterator[list[Image]]:
    """The images of each container of the section."""
    while begin < end:
        magic, version, header, size = CONTAINER.unpack_from(data, begin)
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"at {begin:#x}: container {magic:#x}, version {version}, is not known")
        place, stop = begin + header, begin + header + size
        images = []
        while place < stop:
            kind, _, header, size, sm = IMAGE.unpack_from(data, place)
            images.append(Image(kind, sm, place + header, place + header + size))
            if kind not in (PTX, CUBIN) or header < IMAGE.size:
                raise ValueError(f"at {place:#x}: an image of kind {kind} with a header of {header} bytes is not known")
            place = images[-1].end
        if place != stop or stop > end:
            raise ValueError(f"at {begin:#x}: the images end at {place:#x}, the container at {stop:#x}")
        yield images
        begin = -(-stop // ALIGNMENT) * ALIGNMENT


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, help="architecture of the GPU, such as 90: the only one packed")
    parser.add_argument("--out", type=Path, default=Path("build/wheels"), help="folder of the pieces [build/wheels]")
    parser.add_argument("--tensorrt-rtx", action="store_true", help="TensorRT-RTX too, for all architectures")
    parser.add_argument("--install", type=Path, nargs=2, metavar=("PIECES", "SITE"), help="unpack, on the GPU machine")
    options = parser.parse_args()
    try:
        if options.install:
            print(f"carried packages: {install(*options.install)}")
            return 0
        if options.sm is None:
            parser.error("say which architecture: --sm 90.")
        wheels, sources = ((*WHEELS, *RTX_WHEELS), RTX_SOURCES) if options.tensorrt_rtx else (WHEELS, ())
        for path in pack(options.out, options.sm, wheels, sources, piece_bytes=room_beside(ROOT)):
            print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.relative_to(options.out)}")
    except (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
