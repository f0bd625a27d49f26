"""A library's CUDA code for one architecture: all other code is overwritten with zeros, which compress to nothing.

Section ``.nv_fatbin`` of an ELF file holds containers one behind the other, one for each compiled source. A container
holds images: machine code ("cubin") for an architecture, or PTX. CUDA takes the one that fits the GPU, and no other.
NVIDIA documents none of it, so whatever looks different is an error, and nothing is written.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTION = b".nv_fatbin"
CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of the images."""
MAGIC, VERSION = 0xBA55ED50, 1
IMAGE = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code, architecture."""
PTX, CUBIN = 1, 2
ALIGNMENT = 8


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
                raise ValueError(f"section {SECTION.decode()} ends behind the file")
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
