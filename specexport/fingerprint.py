"""What decides a build's result, as hashes: our own sources, tool versions, recipe and weights.

Nothing is imported to find a version, so that a build with nothing to do ends before torch would have loaded.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specexport_runtime import abi, manifest, profiles

TOOLS = (
    "specexport",
    "torch",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "safetensors",
    "tokenizers",
    "gguf",
    "numpy",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "triton",
)
"""Distributions whose version decides what a build writes."""

ENGINE_SOURCES = (
    "frontend",
    "ops",
    "passes",
    "lowering",
    "backends",
    "kernels",
    "plugin",
    "engine_check.py",
    "cpu_build.py",
    "gpu_build.py",
    "model_build.py",
)
BUNDLE_SOURCES = ("pipeline.py", "bundle.py", "vocabulary.py", "recipe.py", "recipe_gpu.py", "built.py")
"""Modules of this package that decide an engine's content, and those that decide the rest of a bundle."""


def tool_versions() -> dict[str, str]:
    """Installed version of each tool; tools that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def hash_sources(names: tuple[str, ...], root: Path | None = None) -> str:
    """Hash of our own Python sources.

    Args:
        names: files and folders of the package; missing ones count as empty.
        root: the package folder; None takes this package's.
    """
    root = root or Path(__file__).parent
    paths = [Path(module.__file__) for module in (abi, manifest, profiles) if module.__file__]
    for name in names:
        path = root / name
        paths += sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.is_file()
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def hash_values(values: Mapping[str, Any]) -> str:
    """Hash of plain values, independent of their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
