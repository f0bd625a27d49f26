"""Bundles of a target and a head that a test wrote, and what their heads draft."""

from pathlib import Path
from typing import Any

from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.fakes import rounds

opened = rounds.opened


def build(target_folder: Path, folder: Path, **options: Any) -> Path:
    recipe = {"target": str(target_folder), "head": str(folder / "head"), "output": str(folder / "b")}
    build_bundle(BuildRecipe(**(recipe | {"max_model_len": 64} | options)))
    return folder / "b"


def build_module(path: Path, output: Path, **options: Any) -> Any:
    """Build a target with the MTP module of its checkpoint; gives the manifest's models."""
    recipe = {"target": str(path), "head": "mtp", "output": str(output), "max_model_len": 64}
    build_bundle(BuildRecipe(**(recipe | options)))
    return load_manifest(output).models


class Watch:
    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], list[int]]] = []

    def on_round(self, record: Any) -> None:
        for event in record.events:
            before = event.request.tokens[: len(event.request.tokens) - len(event.tokens)]
            self.rounds.append((before, list(event.proposal.tokens)))

    def on_finish(self, _: Any) -> None: ...
