"""docker/pins: all that the images install, by version and hash, as pyproject.toml allows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.pins import FOLDER, ROOT, requirements

FILES = sorted(FOLDER.glob("*.txt"))
LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.]+)( --hash=sha256:[0-9a-f]{64})+")
each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@each
def test_every_package_has_hashes_and_a_version_that_was_tested(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(found["name"]): found["version"] for line in lines if (found := LINE.fullmatch(line))}
    assert len(pinned) == len(lines)
    for wanted in map(Requirement, requirements(path.stem)):
        if wanted.marker is None or wanted.marker.evaluate({"sys_platform": "linux", "platform_machine": "x86_64"}):
            assert wanted.specifier.contains(Version(pinned[canonicalize_name(wanted.name)])), wanted


def test_images_install_nothing_but_pins() -> None:
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        text = path.read_text().replace("\\\n", "")
        names = re.findall(r"-r docker/pins/(\S+)\.txt", text)
        assert len(names) == 2
        assert {name.replace("${PINS}", "cuda") for name in names} <= {path.stem for path in FILES}
        for command in re.findall(r"pip (?:wheel|install|.*? install) [^&]*", text):
            assert "--require-hashes" in command or "--no-deps" in command, command
        assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)


@pytest.mark.whole
@each
def test_no_vulnerability_is_known(path: Path) -> None:
    command = [
        sys.executable, "-m", "pip_audit", "-r", str(path), "--disable-pip", "--require-hashes",
        "--progress-spinner=off",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    unknown = done.returncode == 0 and "could not be audited" in done.stdout
    if unknown or "ConnectionError" in done.stderr:
        pytest.skip("PyPI's list of vulnerabilities cannot be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr
