"""Bundles of a target and a head that a test wrote, and what their heads draft."""

from pathlib import Path
from typing import Any

from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe


def build(target_folder: Path, folder: Path, **options: Any) -> Path:
    """Build the target with the head in ``folder/head``; gives the bundle."""
    recipe = BuildRecipe(
        target=str(target_folder), head=str(folder / "head"), output=str(folder / "b"), max_model_len=64, **options
    )
    build_bundle(recipe)
    return folder / "b"


class Watch:
    """What was drafted, and behind which tokens."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], list[int]]] = []

    def on_round(self, record: Any) -> None:
        for event in record.events:
            before = event.request.tokens[: len(event.request.tokens) - len(event.tokens)]
            self.rounds.append((before, list(event.proposal.tokens)))

    def on_finish(self, _: Any) -> None: ...
