"""A target whose drafts are trained, a bundle of it, and prompts."""

import json
from pathlib import Path

import pytest

from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport.train import run
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.models.training import LAYERS


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_llama(seed=11, num_hidden_layers=LAYERS), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i} and {i * i} are {chr(65 + i % 26)}"}) for i in range(40)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    build_bundle(BuildRecipe(target=str(target), output=str(folder), max_model_len=128, check=False))
    return folder


@pytest.fixture
def saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOOK_EVERY", 4)
