"""Our own sources with something added, run in another process: what a change takes is then what a test edits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNTIME, COMPILER = ROOT / "runtime" / "specexport_runtime", ROOT / "specexport"


def copy_runtime(folder: Path, package: Path = RUNTIME) -> Path:
    """A copy of the runtime, or of another package, in ``folder``."""
    return Path(shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__")))


def changed_files(copy: Path, package: Path) -> dict[str, int]:
    """The files that a copy of a package has otherwise, and how many lines of each are new."""
    found = {}
    for path in sorted(copy.rglob("*.py")):
        name = path.relative_to(copy)
        old = (package / name).read_text(encoding="utf-8").splitlines() if (package / name).is_file() else []
        new = [line for line in path.read_text(encoding="utf-8").splitlines() if line not in old]
        if new:
            found[str(name)] = len(new)
    return found


def edit(path: Path, changes: dict[str, str]) -> None:
    """Replace texts of a file, each of which must be there."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run_with(package: Path, program: str, *arguments: object) -> dict[str, Any]:
    """Run a program over a copied package, beside the compiler's own sources; its last line is JSON."""
    places = (package.parent, RUNTIME.parent, ROOT)
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
