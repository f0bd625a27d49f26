"""A tiny checkpoint, and copies that tests may damage."""

import shutil
from pathlib import Path

import pytest

from tests.support.models.tiny_models import make_llama, save_checkpoint


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: a Llama with one table for its embedding and its LM head."""
    return save_checkpoint(make_llama(tie_word_embeddings=True), tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))
