"""The tiny pair and what tests do with it (a conftest cannot be imported by name)."""

from pathlib import Path

import numpy as np

from specexport.compile import check
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.entry import ModelEntry


class TinyPair:
    def __init__(self, folder: Path) -> None:
        self.target = folder / "target"
        self.draft = folder / "draft"

    def recipe(self, output: Path, **values: object) -> BuildRecipe:
        both = {"target": str(self.target), "draft": str(self.draft), "output": str(output)}
        return BuildRecipe(**(both | values))  # type: ignore[arg-type]


def own_logits(folder: Path, entry: ModelEntry, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """What an engine gives in wide steps, in the place of eager logits: the check then finds what a test adds."""
    logits = [np.full((len(sequence), entry.vocab_size), np.nan, np.float32) for sequence in sequences]
    for (row, position), values in check.run_engine(folder, entry, sequences)[0][2]:
        logits[row][position] = values
    return logits
