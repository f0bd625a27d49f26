"""The wheel of this platform, made once a session: compiling its operators takes long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases.shared import made_once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(session_dir: Path) -> Path:
    folder = session_dir / "wheel"

    def make() -> None:
        # hatchling itself, not through a build front end: no isolated environment, no index.
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_"))}
        done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    (path,) = made_once(folder, make).glob("*.whl")
    return path
