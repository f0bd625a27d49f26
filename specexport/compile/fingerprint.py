"""What decides a build's result, as hashes: our own sources, tool versions, recipe and weights.

Nothing is imported to find a version or a source, so that a build with nothing to do ends before torch would have
loaded. Which sources count follows from their imports: a file that is moved, split or added cannot be forgotten.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexport_runtime.errors import SpecexportError
from specexport_runtime.machine import read_versions

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

ENGINE_ROOT = "specexport.compile.model"
"""What builds one engine: with all that it imports, it decides an engine's content."""
HEAD_ROOT = "specexport.compile.head"
"""What builds the engine of a draft head, and says what its target gives."""
BUNDLE_ROOT = "specexport.compile.pipeline"
"""What makes a bundle of engines: with all that it imports, it decides the rest."""

_PACKAGES = ("specexport", "specexport_runtime")
_DOTTED = re.compile(r"(specexport|specexport_runtime)(\.[a-z_][a-z0-9_]*)+")


def tool_versions() -> dict[str, str]:
    """Installed version of each tool; tools that are not installed are left out."""
    return {"python": platform.python_version(), **read_versions(TOOLS)}


def hash_sources(root: str) -> str:
    """Hash of a module of ours and of every module of ours that it needs; see :func:`find_needed_sources`."""
    digest = hashlib.sha256()
    for name, path in sorted(find_needed_sources(root).items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def find_needed_sources(root: str) -> dict[str, Path]:
    """The source files that a module of ours depends on, directly or not, its own among them, by dotted name.

    Imports inside functions count; those for type checkers alone do not. A module that is only named, in a string (a
    worker process, a lazy registry), counts like one that is imported. The ``__init__`` of a package counts where it is
    imported from, not for every module below it. Raises SpecexportError if there is no module of a name.
    """
    found: dict[str, Path] = {}
    left = [root]
    while left:
        name = left.pop()
        if name in found:
            continue
        path = _find_source(name)
        if path is None:
            raise SpecexportError(f"{name} decides what a build writes, and there is no such module.")
        found[name] = path
        left += _find_imports(path)
    return found


@functools.cache
def _find_source(name: str) -> Path | None:
    """The file of a module of ours; None if there is none."""
    package, *parts = name.split(".")
    place = _package_folder(package).joinpath(*parts)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@functools.cache
def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SpecexportError(f"the package {package} has no source folder.")
    return Path(spec.origin).parent


@functools.cache
def _find_imports(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules of ours that a source file imports or names."""
    names: list[str] = []
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _PACKAGES:
            for part in node.names:
                whole = f"{node.module}.{part.name}"
                names.append(whole if _find_source(whole) else node.module)
        elif isinstance(node, ast.Import):
            names += [part.name for part in node.names if part.name.split(".")[0] in _PACKAGES]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            names += [node.value] * (_find_source(node.value) is not None)
        left += ast.iter_child_nodes(node)
    return tuple(names)


def hash_values(values: Mapping[str, Any]) -> str:
    """Hash of plain values, independent of their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
