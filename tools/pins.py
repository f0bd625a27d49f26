"""Write what the images install: docker/pins/*.txt, exact versions with the hashes of their wheels for Linux.

    .venv/bin/python tools/pins.py            # the newest that pyproject.toml allows
    .venv/bin/python tools/pins.py cpu build  # these files only

pip resolves for the images' Python and processors; nothing is installed. Run the tests with what comes out before it
is committed.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docker" / "pins"
PYTHON = "3.11"
GLIBC = range(17, 37)  # Debian 12 has 2.36
PROCESSORS = ("x86_64", "aarch64")
EXTRAS = {
    "cpu": ("cpu", "serve", "structured"),
    "cuda": ("cuda", "serve", "structured"),
    "tensorrt-rtx": ("tensorrt-rtx", "serve", "structured"),
}
ONLY_X86 = {"cuda", "tensorrt-rtx"}  # onnxruntime-gpu and TensorRT-RTX have no other wheels
META = "tensorrt-rtx-cu13"  # Python sources alone, without a wheel; setuptools makes one


def requirements(name: str) -> list[str]:
    """What a file has to hold, as pyproject.toml says it; ``build`` is what makes our own wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if name == "build":
        return [*project["build-system"]["requires"], "setuptools>=80"]
    extras = project["project"]["optional-dependencies"]
    return [*project["project"]["dependencies"], *(each for extra in EXTRAS[name] for each in extras[extra])]


def resolve(wanted: Iterable[str], *where: str) -> dict[str, str]:
    """SHA-256 by ``name==version`` of all that is wanted and needed; ``where`` it shall run, as options of pip."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-cache-dir", "--target", folder, "--report", str(report), *where, *wanted]
        subprocess.run(command, check=True)  # our own requirements
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {"{name}=={version}".format(**each["metadata"]): hash_of(each["download_info"]) for each in found}


def hash_of(download: dict[str, Any]) -> str:
    """SHA-256 of what pip would download."""
    return str(download["archive_info"]["hashes"]["sha256"])


def resolve_wheels(wanted: Iterable[str], processor: str) -> dict[str, str]:
    """As :func:`resolve`, for an image: wheels only."""
    where = ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    platforms = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in GLIBC))
    return resolve(wanted, *where, *(f"--platform={each}_{processor}" for each in platforms))


def main() -> None:
    """Write the files that are named, or all."""
    for name in sys.argv[1:] or [*EXTRAS, "build"]:
        hashes = defaultdict(set)
        wanted = requirements(name)
        for processor in PROCESSORS[: 1 if name in ONLY_X86 else None]:
            parts = [each for each in wanted if not each.startswith(META)]
            for each in set(wanted).difference(parts):
                for package, digest in resolve([each], "--no-deps").items():
                    hashes[package].add(digest)
                parts += [each.replace(META, f"{META}-{part}") for part in ("bindings", "libs")]
            for package, digest in resolve_wheels(parts, processor).items():
                hashes[package].add(digest)
        lines = [
            " ".join([package, *(f"--hash=sha256:{digest}" for digest in sorted(digests))])
            for package, digests in sorted(hashes.items(), key=lambda each: each[0].lower())
        ]
        (FOLDER / f"{name}.txt").write_text("# tools/pins.py wrote this.\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
