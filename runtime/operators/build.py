"""Compile the library of operators: ``python runtime/operators/build.py`` puts it into the runtime package.

The compiler is ``CXX``, else the ``ziglang`` wheel's. Standard library only: hatchling's hook and the Makefile run it.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "specexport_runtime"
FLAGS = (
    "-std=c++17 -O3 -shared -s -fvisibility=hidden -fno-exceptions -fno-rtti -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra"
).split()
_CPUS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


class Target(NamedTuple):
    """A platform that wheels are made for.

    Attributes:
        zig: its name for zig, with the oldest C library that it runs on.
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


def this_target() -> str:
    """The name of this platform in :data:`TARGETS`, or of one that is not there."""
    return f"{sys.platform}/{_CPUS.get(platform.machine().lower(), platform.machine())}"


def sources() -> list[Path]:
    """What is compiled, and what that includes."""
    return sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.h")])


def fingerprint() -> str:
    """Of all sources and flags, so that a stale library is found."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sources():
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(name: str, out: Path) -> None:
    """Compile for the platform ``name`` into ``out``.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    command = [*_compiler(name), *FLAGS, f'-DSPECEXPORT_BUILD="{fingerprint()}"']
    command += [] if name.startswith("win32") else ["-fPIC"]
    command += ["-Wl,-z,nodelete"] if name.startswith("linux") else []
    command += ["-o", str(out), *(str(path) for path in sources() if path.suffix == ".cpp")]
    subprocess.run(command, check=True)  # noqa: S603 the compiler


def _compiler(name: str) -> list[str]:
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    return [sys.executable, "-m", "ziglang", "c++", "-target", TARGETS[name].zig, "-nostdlib++"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=this_target(), choices=TARGETS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or PACKAGE / f"_operators.{TARGETS[given.target].suffix}"
    compile_library(given.target, out)


if __name__ == "__main__":
    main()
