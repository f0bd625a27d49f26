"""Install specexport into the virtual environment that runs this script, without CUDA packages that it does not use.

On Linux the public index serves a torch that depends on several gigabytes of CUDA packages, which builds do not need,
even for a GPU. This script first asks pip what the configured index would give. If that needs CUDA packages, torch is
taken from PyTorch's own index of CPU builds; in every other case pip installs as usual. ONNX Runtime's packages for
CPUs and for GPUs share their files: where the other one is installed, it is removed first. Standard library and pip: it
runs before anything is installed.

    .venv/bin/python tools/install.py export,cpu
    .venv/bin/python tools/install.py export,cuda               # for an NVIDIA GPU
    .venv/bin/python tools/install.py export,cpu --dry-run      # print the decision, change nothing
    .venv/bin/python tools/install.py export,cpu --torch-cuda   # keep the index's own build
"""

from __future__ import annotations  # so that an old Python reads this file, and says that it is one

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Below this version a dry run downloads whole wheels where their metadata would do.
PIP_FOR_DRY_RUN = "pip>=24,<27"
# Each extra's ONNX Runtime, and the package that must not lie beside it.
ONNX_RUNTIMES = {"cpu": ("onnxruntime", "onnxruntime-gpu"), "cuda": ("onnxruntime-gpu", "onnxruntime")}
_CUDA_NAME = re.compile(r"^(nvidia|cuda)[-_.]", re.IGNORECASE)


class Decision(NamedTuple):
    """Where torch comes from."""

    use_cpu_index: bool  # True for PyTorch's index of CPU builds, False for the configured index
    reason: str  # one sentence for the person who waits


def decide(report: Mapping[str, Any], *, torch_cuda: bool = False) -> Decision:
    """Choose where torch comes from by pip's installation report (format version 1) for ``torch`` alone.

    ``torch_cuda``: the user asked for the index's own build.
    """
    if torch_cuda:
        return Decision(False, "--torch-cuda was given, so torch comes from the configured index.")
    wheel = next((item for item in report.get("install", ()) if item["metadata"]["name"].lower() == "torch"), None)
    if wheel is None:
        return Decision(False, "pip reported nothing about torch, so it is left to pip.")
    version = wheel["metadata"]["version"]
    if version.endswith("+cpu"):
        return Decision(False, f"the configured index gives torch {version}, a CPU build.")
    cuda = cuda_packages(wheel["metadata"].get("requires_dist", ()), report.get("environment", {}))
    if not cuda:
        return Decision(False, f"the configured index gives torch {version}, which needs no CUDA packages here.")
    return Decision(
        True,
        f"torch {version} from the configured index needs {len(cuda)} CUDA packages ({cuda[0]}, …), and builds use "
        f"none: taking the CPU build from {CPU_INDEX} (--torch-cuda keeps the other).",
    )


def cuda_packages(requirements: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Names of the CUDA packages among ``requirements`` whose markers hold in ``environment``."""
    from pip._vendor.packaging.requirements import Requirement  # pip is in every virtual environment, packaging is not

    parsed = [Requirement(text) for text in requirements]
    needed = [each for each in parsed if each.marker is None or each.marker.evaluate({**environment, "extra": ""})]
    return [each.name for each in needed if _CUDA_NAME.match(each.name)]


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str, check: bool = True) -> int:
    """Run pip in this environment with its progress on a terminal, quietly elsewhere."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    return subprocess.run(command, check=check, stdin=subprocess.DEVNULL).returncode


def torch_report(*, may_upgrade_pip: bool) -> dict[str, Any]:
    """What the configured index would give for ``TORCH``, as pip's report; empty if pip cannot say."""
    if may_upgrade_pip and int((installed_version("pip") or "0").split(".")[0]) < 24:
        pip("--upgrade", PIP_FOR_DRY_RUN)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--quiet", "--report", "-", TORCH]
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        report: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return {}
    return report


def install_torch(*, torch_cuda: bool, dry_run: bool) -> None:
    """Install ``TORCH`` unless it is there, from the place that :func:`decide` names."""
    if installed := installed_version("torch"):
        say(f"torch {installed} is installed already.")
        return
    report = torch_report(may_upgrade_pip=not dry_run) if sys.platform == "linux" and not torch_cuda else {}
    decision = decide(report, torch_cuda=torch_cuda)
    say(decision.reason)
    if dry_run:
        return
    if decision.use_cpu_index:
        # Only torch itself: its dependencies are resolved from the configured index, together with ours.
        if pip("--no-deps", "--index-url", CPU_INDEX, "--retries", "1", TORCH, check=False) == 0:
            return
        say(f"{CPU_INDEX} could not serve it: taking the configured index's build with its CUDA packages.")
    pip(TORCH)


def clashing(extras: Sequence[str]) -> list[str]:
    """The ONNX Runtime packages to remove before ``extras`` are installed; ValueError for both kinds at once."""
    wanted = [ONNX_RUNTIMES[extra] for extra in extras if extra in ONNX_RUNTIMES]
    if len(wanted) > 1:
        raise ValueError("`cpu` and `cuda` exclude each other; with `cuda`, bundles for CPUs run too")
    if not wanted or installed_version(wanted[0][1]) is None:
        return []
    return [name for name in wanted[0] if installed_version(name)]


def say(message: str) -> None:
    """Print one line at once."""
    print(f"install: {message}", flush=True)


def main() -> None:
    """Parse the command line and install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", help="comma-separated extras, for example export,cpu")
    parser.add_argument("--torch-cuda", action="store_true", default=bool(os.environ.get("SPECEXPORT_TORCH_CUDA")))
    parser.add_argument("--dry-run", action="store_true", help="print the decision and change nothing")
    options = parser.parse_args()
    if sys.version_info[:2] < OLDEST:
        wanted, found = (".".join(map(str, version)) for version in (OLDEST, sys.version_info[:2]))
        parser.error(f"specexport needs Python {wanted} or newer, and this is {found}; nothing was installed")
    if sys.prefix == sys.base_prefix and not options.dry_run:
        parser.error("run this with a virtual environment's python, for example .venv/bin/python")
    started = time.monotonic()
    extras = options.extras.split(",")
    try:
        remove = clashing(extras)
    except ValueError as error:
        parser.error(f"{error}.")
    if remove:
        say(f"removing {' and '.join(remove)}, which share their files with what is asked for.")
        if not options.dry_run:
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *remove], check=True)
    if {"export", "dev"} & set(extras):
        install_torch(torch_cuda=options.torch_cuda, dry_run=options.dry_run)
    if options.dry_run:
        return
    say(f"specexport[{options.extras}] into {sys.prefix} …")
    pip("--editable", f"{ROOT}[{options.extras}]")
    say(f"done in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"install: pip failed (exit code {error.returncode}); its message is above.")
