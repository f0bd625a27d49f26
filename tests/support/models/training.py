"""A training of a few batches."""

from pathlib import Path
from typing import Any

from specexport.train.options import TrainOptions

LAYERS = 6
"""Of the target."""


def options(target: Path, prompts: Path, bundle: Path, output: Path, **changes: Any) -> TrainOptions:
    usual = {"max_tokens": 24, "batches": 12, "batch_tokens": 256, "threads": 1}
    return TrainOptions(str(target), output, (prompts,), bundle=bundle, **(usual | changes))
