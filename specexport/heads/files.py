"""A draft head's files: their configuration, and their tensors by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HeadFiles:
    """A head as it lies on disk.

    Attributes:
        name: its name in reports; never a machine path.
        values: ``config.json``.
        shapes: shape of each tensor, by the name in our form.
        stored: file and name of each of them in it.
    """

    name: str
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, tuple[Path, str]]

    def tensor(self, name: str) -> Any:
        """One tensor, as torch has it."""
        from safetensors import safe_open

        path, key = self.stored[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)
