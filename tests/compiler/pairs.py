"""The tiny pair, for fixtures and for type annotations (a conftest cannot be imported by name)."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specexport.recipe import BuildRecipe


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``: the workers of pytest-xdist are separate processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class TinyPair:
    """Folders of a tiny target and draft with one tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "target"
        self.draft = folder / "draft"

    def recipe(self, output: Path, **values: object) -> BuildRecipe:
        """A recipe for the pair."""
        both = {"target": str(self.target), "draft": str(self.draft), "output": str(output)}
        return BuildRecipe(**(both | values))  # type: ignore[arg-type]
