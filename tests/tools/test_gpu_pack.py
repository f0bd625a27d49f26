import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tools import gpu_pack
from tools.gpu_pack import CUBIN, PTX, keep_architecture

# CUDA code of one architecture


def make_container(*images: tuple[int, int, bytes]) -> bytes:
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 257, 64, len(code), sm) + code for kind, sm, code in images
    )  # fmt: skip
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return whole + bytes(-len(whole) % 8)


def make_library(path: Path, *containers: bytes) -> Path:
    """An ELF file of three sections: none, the names, and the containers."""
    names, code = b"\0.shstrtab\0.nv_fatbin".ljust(32, b"\0"), b"".join(containers)
    header = b"\x7fELF\x02\x01".ljust(40, b"\0")
    sections = ((0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(code)))
    header += struct.pack("<Q10xHHH", 64 + len(names) + len(code), 64, 3, 1)
    table = b"".join(struct.pack("<II16xQQ24x", name, 1, begin, size) for name, begin, size in sections)
    path.write_bytes(header + names + code + table)
    return path


def test_the_code_of_other_architectures_is_zeroed(tmp_path: Path) -> None:
    def containers(*, zeroed: bool) -> list[bytes]:
        def code(letter: bytes) -> bytes:
            return bytes(21) if zeroed and letter in b"xyz" else 21 * letter

        return [
            make_container((CUBIN, 80, code(b"x")), (CUBIN, 90, code(b"a")), (PTX, 90, code(b"y"))),
            make_container((CUBIN, 120, code(b"z")), (PTX, 80, code(b"p"))),  # the GPU compiles the PTX
        ]

    library = make_library(tmp_path / "cuda.so", *containers(zeroed=False))
    assert keep_architecture(library, 90) == 3 * 21
    expected = make_library(tmp_path / "expected.so", *containers(zeroed=True))
    assert library.read_bytes() == expected.read_bytes()


def test_a_gpu_without_code_of_its_own_takes_the_latest_of_its_generation(tmp_path: Path) -> None:
    library = make_library(tmp_path / "cuda.so", make_container(*((CUBIN, sm, b"%d" % sm) for sm in (75, 80, 86, 90))))
    before = library.read_bytes()
    with pytest.raises(ValueError, match=r"no machine code for sm 100; it has 75, 80, 86, 90"):
        keep_architecture(library, 100)
    assert library.read_bytes() == before
    assert keep_architecture(library, 89) == 6
    assert [code in library.read_bytes() for code in (b"75", b"80", b"86", b"90")] == [False, False, True, False]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"MZ" + data[2:], "no ELF file"),
        (lambda data: data.replace(b"\x50\xed\x55\xba\x01", b"\x50\xed\x55\xba\x02"), "version 2, is not known"),
        (lambda data: data.replace(struct.pack("<HHI", CUBIN, 257, 64), struct.pack("<HHI", 7, 257, 64)), "kind 7"),
        (lambda data: data[:-70], "cannot be cut down"),
    ],
)
def test_an_unknown_layout_is_an_error_and_changes_nothing(tmp_path, damage, message):
    library = make_library(tmp_path / "cuda.so", make_container((CUBIN, 80, bytes(21)), (CUBIN, 90, 21 * b"a")))
    library.write_bytes(damage(library.read_bytes()))
    before = library.read_bytes()
    with pytest.raises(ValueError, match=message):
        keep_architecture(library, 90)
    assert library.read_bytes() == before


# from an index to the GPU machine


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{name}-1.0.data/scripts/program", "")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    library = make_library(tmp_path / "cuda.so", make_container((CUBIN, 80, 99 * b"x"), (CUBIN, 90, 99 * b"a")))
    make_wheel(folder, "onnxruntime", {
        gpu_pack.CUDA_LIBRARY: library.read_bytes(), "onnxruntime/capi/libonnxruntime.so.1": b"not used",
        "onnxruntime/capi/libonnxruntime_providers_shared.so": b"used",
    })  # fmt: skip
    make_wheel(
        folder, "one", {"carried/one.py": b"VALUE = 42\n#" + np.random.default_rng(1).bytes(1000).hex().encode()}
    )
    make_wheel(folder, "two", {"two-1.0.data/purelib/carried/two.py": b"VALUE = 43\n"})
    (folder / "one-1.0-py3-none-any.whl").rename(folder / "one-1.0-cp312-cp312-manylinux_2_28_x86_64.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_what_is_packed_arrives(tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, work = tmp_path / "wheels", tmp_path / "work"
    names = ("onnxruntime", "one", "nowhere-to-be-had", "two")
    pieces = gpu_pack.pack(folder, 90, names, piece_bytes=500)
    assert len(pieces) > 2
    assert "nowhere-to-be-had could not be fetched" in capfd.readouterr().err
    away = pieces[1].rename(tmp_path / pieces[1].name)
    site = work / "site"
    assert gpu_pack.install(folder, site) == f"{len(pieces) - 1} of {len(pieces)} pieces are here"
    away.write_bytes(bytes(reversed(content := away.read_bytes())))
    away.rename(pieces[1])  # a later call brings it
    with pytest.raises((lzma.LZMAError, EOFError, tarfile.TarError)):
        gpu_pack.install(folder, site)
    pieces[1].write_bytes(content)
    assert gpu_pack.install(folder, site) == "installed"
    assert gpu_pack.install(folder, site) == "is there"
    assert b"x" not in (site / gpu_pack.CUDA_LIBRARY).read_bytes()
    assert 99 * b"a" in (site / gpu_pack.CUDA_LIBRARY).read_bytes()
    assert [path.name for path in site.rglob("libonnxruntime*")] == [
        "libonnxruntime_providers_cuda.so", "libonnxruntime_providers_shared.so",
    ]  # fmt: skip
    assert not list(site.rglob("program"))
    done = subprocess.run(
        [sys.executable, "-c", "import carried.one, carried.two; print(carried.one.VALUE, carried.two.VALUE)"],
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "42 43"
    assert sorted(path.name for path in work.iterdir()) == ["site"], "nothing is left in between"
