"""How the CPU operators are compiled: by what compiler, for which platform, into which wheel."""

import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.cases.loaded import load_file

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "runtime" / "operators" / "build.py"
EXPORTED = (b"RegisterCustomOps", b"specexport_kernels", b"specexport_build")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load_file(BUILD)


def hatchling(kind: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "SPECEXPORT_TARGET")}
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """Writes its arguments, and those of the objects that it links."""
    path = tmp_path / "my compiler"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "objects = [json.load(open(each)) for each in sys.argv if each.endswith('.o') and os.path.exists(each)]\n"
        "open(sys.argv[sys.argv.index('-o') + 1], 'w').write(json.dumps(sum(objects, sys.argv[1:])))\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.whole
def test_the_source_distribution_has_sources_and_hook_and_no_library(tmp_path: Path) -> None:
    done = hatchling("sdist", tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in BUILD.parent.rglob("*.*") if path.suffix != ".pyc"}
    assert sources | {"hatch_build.py", "pyproject.toml"} <= names
    assert "runtime/operators/library.cpp" in sources
    assert not [name for name in names if Path(name).stem == "_operators"]


@pytest.mark.whole
def test_cxx_is_the_compiler_and_promises_this_machine_alone(build, compiler, tmp_path, monkeypatch):
    here = build.this_target()
    monkeypatch.setenv("CXX", f"'{compiler}' -m64")
    build.compile_library(here, tmp_path / "made.so")
    arguments = json.loads((tmp_path / "made.so").read_text())
    assert arguments[0] == "-m64"
    assert {"-O3", "-s", "-shared", "-ffp-contract=off"} <= set(arguments)
    assert f'-DSPECEXPORT_BUILD="{build.fingerprint()}"' in arguments
    assert "manylinux" not in build.wheel_tag(here)
    build.compile_library(here, tmp_path / "checked.so", sanitize="thread")
    arguments = json.loads((tmp_path / "checked.so").read_text())
    assert {"-fsanitize=thread", "-g", "-O1"} <= set(arguments)
    assert not {"-O3", "-s"} & set(arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checked.so", "made.so", compiler.name]
    assert hatchling("wheel", tmp_path, CXX=f"'{compiler}'").returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith(f"py3-none-{build.wheel_tag(here)}")
    with zipfile.ZipFile(wheel) as archive:
        assert "-O3" in json.loads(archive.read(f"specexport_runtime/{build.file_name(here)}"))


def test_an_editable_installation_has_the_library_beside_its_sources(build, compiler, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "runtime" / "operators", tmp_path / "runtime" / "operators")
    (tmp_path / "runtime" / "specexport_runtime").mkdir()
    monkeypatch.setenv("CXX", f"'{compiler}'")
    app = SimpleNamespace(display_info=str, abort=pytest.fail)
    hook = load_file(ROOT / "hatch_build.py").OperatorsHook(str(tmp_path), {}, None, None, "", "wheel", app)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    hook.finalize("editable", data, "")
    library = tmp_path / "runtime" / "specexport_runtime" / build.file_name(build.this_target())
    assert "-O3" in json.loads(library.read_text())
    assert data.pop("force_include") == {}
    assert data == {"pure_python": False, "tag": f"py3-none-{build.wheel_tag(build.this_target())}"}


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"CXX": "false"}, r"specexport: false failed \(exit code 1\)"),
        ({"CXX": "/none/c++"}, r"specexport: /none/c\+\+ cannot be run .*set CXX to a C\+\+17 compiler"),
        ({"SPECEXPORT_TARGET": "plan9/x86_64"}, r"SPECEXPORT_TARGET=plan9/x86_64: there are .*win32/aarch64"),
    ],
    ids=["fails", "missing", "unknown platform"],
)
def test_a_wheel_that_cannot_be_compiled_says_why(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    done = hatchling("wheel", tmp_path, **environment)
    assert done.returncode == 1
    assert re.search(says, done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_any_compiler_one_line_says_what_to_do(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    command = [sys.executable, "-S", str(BUILD), "--out", str(tmp_path / "made.so")]  # no ziglang
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"operators: no C\+\+ compiler for \S+: pip install 'ziglang[^\n]+, or set CXX[^\n]+\n", done.stderr
    )
    (tmp_path / "c++").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho system > "$2"\n')
    (tmp_path / "c++").chmod(0o755)
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "made.so").read_text() == "system\n"


def form_of(library: bytes) -> tuple[str, int]:
    if library[:5] == b"\x7fELF\x02":
        return "ELF", struct.unpack_from("<H", library, 18)[0]
    if library[:4] == b"\xcf\xfa\xed\xfe":
        return "Mach-O", struct.unpack_from("<I", library, 4)[0]
    start = struct.unpack_from("<I", library, 0x3C)[0]
    assert library[start : start + 4] == b"PE\0\0"
    return "PE", struct.unpack_from("<H", library, start + 4)[0]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.xdist_group("zig")  # one worker, one cache
@pytest.mark.parametrize(
    ("target", "tag", "suffix", "form"),
    [
        ("linux/x86_64", "manylinux_2_17_x86_64", "so", ("ELF", 0x3E)),
        ("linux/aarch64", "manylinux_2_17_aarch64", "so", ("ELF", 0xB7)),
        ("darwin/aarch64", "macosx_11_0_arm64", "dylib", ("Mach-O", 0x0100000C)),
        pytest.param(
            *("win32/x86_64", "win_amd64", "dll", ("PE", 0x8664)),
            marks=pytest.mark.skipif(
                "SPECEXPORT_WINDOWS_WHEEL" not in os.environ,
                reason="zig first compiles its C library for Windows, 3 minutes: set SPECEXPORT_WINDOWS_WHEEL=1",
            ),
        ),
    ],
)
def test_wheels_of_other_platforms_are_made_here(build, target, tag, suffix, form, session_dir, tmp_path, request):
    """What cannot run here is looked at: the binary's form, its processor, and what it gives."""
    assert build.TARGETS[target].tag == tag
    beside = {path: path.stat().st_mtime_ns for path in build.PACKAGE.glob("_operators.*")}
    if target == build.this_target() and "CXX" not in os.environ:
        wheel: Path = request.getfixturevalue("wheel")  # the same one
    else:
        cache = {name: str(session_dir / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
        done = hatchling("wheel", tmp_path, SPECEXPORT_TARGET=target, **cache)
        assert done.returncode == 0, done.stderr
        (wheel,) = tmp_path.glob("*.whl")
    assert beside == {path: path.stat().st_mtime_ns for path in build.PACKAGE.glob("_operators.*")}
    assert wheel.stem.endswith(f"-py3-none-{tag}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if Path(name).stem == "_operators")
        library = archive.read(name)
    assert name == f"specexport_runtime/_operators.{suffix}"
    assert form_of(library) == form
    assert all(symbol in library for symbol in EXPORTED)
    assert build.fingerprint().encode() in library
    assert len(library) < 1_800_000  # products of each format are unrolled for each number of rows; 0.6 MB in the wheel
    assert not re.search(rb"libstdc\+\+|libc\+\+|libgcc", library)
    needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)}
    assert max(needed, default=0) <= 17


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.xdist_group("zig")
def test_all_sources_compile_for_windows(build: ModuleType, session_dir: Path, tmp_path: Path) -> None:
    """Without linking, for which zig compiles a C library."""
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", build.TARGETS["win32/x86_64"].zig, *flags]
    caches = {name: str(session_dir / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    for path in build.sources():
        if path.suffix == ".cpp":
            made = tmp_path / f"{path.stem}.obj"
            how = [*command, '-DSPECEXPORT_BUILD="x"', "-c", str(path), "-o", str(made)]
            subprocess.run(how, env=os.environ | caches, check=True)
            assert struct.unpack_from("<H", made.read_bytes())[0] == 0x8664


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64: apt-get install qemu-user")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is for this processor")
def test_older_processors_take_what_they_have(tmp_path: Path) -> None:
    source, program = tmp_path / "main.cpp", tmp_path / "program"
    source.write_text(
        '#include <stdio.h>\n#include "cpu.h"\nbool specexport::amx_multiplies_right() { return true; }\n'
        "int main() { puts(specexport::isa_name(specexport::isa())); }\n"
    )
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-musl"]
    if shutil.which("g++"):
        compiler = ["g++"]
    files = [f"-I{BUILD.parent}", source, BUILD.parent / "cpu.cpp", "-o", program]
    subprocess.run([*compiler, "-std=c++17", "-static", *files], check=True)

    def chosen(model: str, kernels: str = "") -> str:
        environment = {**os.environ, "SPECEXPORT_CPU_KERNELS": kernels}
        done = subprocess.run(
            ["qemu-x86_64", "-cpu", model, program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert chosen("Nehalem") == "portable"
    assert chosen("Haswell") == "avx2"
    assert chosen("Haswell", "portable") == "portable"
    assert chosen("Nehalem", "avx2") == "portable", "what it lacks is not taken"
