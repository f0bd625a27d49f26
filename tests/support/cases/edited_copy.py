"""Our sources with something added, run in another process: what a change takes is then what a test edits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RUNTIME, COMPILER = ROOT / "runtime" / "specexport_runtime", ROOT / "specexport"


def copy_runtime(folder: Path) -> Path:
    return Path(shutil.copytree(RUNTIME, folder / RUNTIME.name, ignore=shutil.ignore_patterns("__pycache__")))


def copy_sources(folder: Path) -> Path:
    """A copy of compiler and runtime in ``folder``; returns the runtime's package."""
    shutil.copytree(COMPILER, folder / COMPILER.name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy_runtime(folder)


def changed_lines(folder: Path) -> dict[str, int]:
    """Lines that were added to a copy, by file; a new file counts as 0."""
    found = {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        old = (ROOT if name.parts[0] == COMPILER.name else RUNTIME.parent) / name
        before = old.read_text(encoding="utf-8").splitlines() if old.exists() else None
        now = path.read_text(encoding="utf-8").splitlines()
        if now != before:
            found[name.as_posix()] = 0 if before is None else len(now) - len(before)
    return found


def edit(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run_with(package: Path, program: str, *arguments: object) -> dict[str, Any]:
    """Run a program over a copied package, with the compiler beside it or else our own; its last line is JSON."""
    places = (package.parent, RUNTIME.parent, ROOT)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}, cwd=package.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
