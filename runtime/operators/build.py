"""Compile the library of operators: ``python runtime/operators/build.py`` puts it into the runtime package.

The compiler is ``CXX``, else the ``ziglang`` wheel's, else one of the system's where there is no such wheel. Standard
library only: hatchling's hook runs it.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "specexport_runtime"
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
LINK_FLAGS = ["-shared", "-s"]
_CPUS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


class Target(NamedTuple):
    """A platform that wheels are made for with zig.

    Attributes:
        zig: its name for zig, with the oldest C library that it runs on. Without it zig would take this machine's own.
        suffix: of the library's file.
        tag: of a wheel's name.
    """

    zig: str
    suffix: str
    tag: str


TARGETS = {
    "linux/x86_64": Target("x86_64-linux-gnu.2.17", "so", "manylinux_2_17_x86_64"),
    "linux/aarch64": Target("aarch64-linux-gnu.2.17", "so", "manylinux_2_17_aarch64"),
    "darwin/x86_64": Target("x86_64-macos.11.0", "dylib", "macosx_11_0_x86_64"),
    "darwin/aarch64": Target("aarch64-macos.11.0", "dylib", "macosx_11_0_arm64"),
    "win32/x86_64": Target("x86_64-windows-gnu", "dll", "win_amd64"),
    "win32/aarch64": Target("aarch64-windows-gnu", "dll", "win_arm64"),
}


class BuildError(RuntimeError):
    """There is no compiler, or it failed; one line."""


def this_target() -> str:
    """The name of this platform in :data:`TARGETS`, or of one that is not there."""
    system = "linux-musl" if "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE")) else sys.platform
    return f"{system}/{_CPUS.get(platform.machine().lower(), platform.machine())}"


def wanted_target() -> str:
    """The platform to compile for: ``SPECEXPORT_TARGET``, else this one.

    Raises:
        BuildError: there is no such platform.
    """
    name = os.environ.get("SPECEXPORT_TARGET") or this_target()
    if name not in TARGETS and name != this_target():
        raise BuildError(f"SPECEXPORT_TARGET={name}: there are {', '.join(TARGETS)}.")
    return name


def file_name(target: str) -> str:
    """Of the library on a platform."""
    return f"_operators.{TARGETS[target].suffix if target in TARGETS else 'so'}"


def wheel_tag(target: str) -> str:
    """Of a wheel with the library: what another compiler makes is promised for machines like this one alone."""
    if target in TARGETS and (target != this_target() or _zig_is_used()):
        return TARGETS[target].tag
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def sources() -> list[Path]:
    """What is compiled, and what that includes."""
    return sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.h")])


def fingerprint() -> str:
    """Of all sources and flags, so that a stale library is found."""
    digest = hashlib.sha256(" ".join(FLAGS + LINK_FLAGS).encode())
    for path in sources():
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(target: str, out: Path, *, sanitize: str = "", program: Path | None = None) -> None:
    """Compile for a platform.

    Args:
        target: name of the platform.
        out: the library's file, replaced as a whole: processes that have the old one mapped keep it.
        sanitize: what ``-fsanitize=`` takes, with ``CXX`` or g++.
        program: a source file with ``main`` that makes a program of it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    flags, links = list(FLAGS), list(LINK_FLAGS)
    if sanitize:
        flags.remove("-O3")
        links[links.index("-s")] = f"-fsanitize={sanitize}"
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]
    if program:
        flags += [f"-I{HERE}", "-pthread"]
        links[links.index("-shared")] = "-pthread"
    flags += [] if target.startswith("win32") else ["-fPIC"]
    # ONNX Runtime unloads a library with its last session, and threads keep what it has given them.
    links += ["-Wl,-z,nodelete", "-Wl,--as-needed"] if target.startswith("linux") and not program else []
    files = [*(path for path in sources() if path.suffix == ".cpp"), *([program] if program else [])]
    compiler = shlex.split(os.environ.get("CXX") or "g++") if sanitize else _compiler(target)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".operators-") as folder:
        made = Path(folder) / out.name  # Mach-O files know their name
        objects, empty = [Path(folder) / f"{at}.o" for at in range(len(files))], Path(folder) / "empty.c"
        empty.touch()
        named = f'-DSPECEXPORT_BUILD="{fingerprint()}"'
        # Else zig keeps 46 MB in the home directory.
        caches = {name: os.environ.get(name) or folder for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}

        def run(*arguments: "str | Path") -> None:
            command = [*compiler, *map(str, arguments)]
            subprocess.run(command, check=True, env={**os.environ, **caches})  # noqa: S603 the compiler

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # a core each: one takes a minute for all
                # Before zig links for the first time it makes the C library's part, as long as it compiles a file.
                tasks = [pool.submit(run, "-shared", empty, "-o", empty.with_suffix(".so"))]
                for file, to in zip(files, objects, strict=True):
                    tasks.append(pool.submit(run, *flags, named, "-c", file, "-o", to))
                for task in tasks:
                    task.result()
            run(*links, *objects, "-o", made)
        except OSError as error:
            raise BuildError(f"{compiler[0]} cannot be run ({error.strerror}): set CXX to a C++17 compiler.") from error
        except subprocess.CalledProcessError as error:
            raise BuildError(f"{compiler[0]} failed (exit code {error.returncode}); its message is above.") from error
        made.replace(out)


def _compiler(target: str) -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    if _zig_is_used() and target in TARGETS:
        return [sys.executable, "-m", "ziglang", "c++", "-target", TARGETS[target].zig, "-nostdlib++"]
    if target == this_target():
        for name in ("c++", "g++", "clang++"):
            if found := shutil.which(name):
                return [found]
    raise BuildError(
        f"no C++ compiler for {target}: pip install 'ziglang>=0.16,<0.18', or set CXX to a C++17 compiler."
    )


def _zig_is_used() -> bool:
    return not os.environ.get("CXX") and importlib.util.find_spec("ziglang") is not None


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=this_target(), choices=sorted({*TARGETS, this_target()}))
    parser.add_argument("--out", type=Path, help="the file, instead of the one in the runtime package")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread: with g++ or CXX, not stripped")
    parser.add_argument("--program", type=Path, help="a source with main(): make a program of it and the operators")
    given = parser.parse_args()
    if (given.sanitize or given.program) and not given.out:
        parser.error("--sanitize and --program need --out")
    out = given.out or PACKAGE / file_name(given.target)
    try:
        compile_library(given.target, out, sanitize=given.sanitize, program=given.program)
    except BuildError as error:
        sys.exit(f"operators: {error}")


if __name__ == "__main__":
    main()
