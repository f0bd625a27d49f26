"""The runtime's sources with something added, run in another process: what a change takes is then what a test edits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).parents[2] / "runtime" / "specexport_runtime"


def copy_runtime(folder: Path) -> Path:
    """A copy of the package in ``folder``."""
    return Path(shutil.copytree(RUNTIME, folder / RUNTIME.name, ignore=shutil.ignore_patterns("__pycache__")))


def edit(path: Path, changes: dict[str, str]) -> None:
    """Replace texts of a file, each of which must be there."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run_with(package: Path, program: str, *arguments: object) -> dict[str, Any]:
    """Run a program over a copied package, beside the compiler's own sources; its last line is JSON."""
    places = (package.parent, RUNTIME.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
