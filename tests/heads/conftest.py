"""The targets that most heads of these tests draft for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.compile import head as head_module
from tests.support.fakes.following_target import behind, make_target
from tests.support.models.tiny_heads import HIDDEN, LAYERS
from tests.support.models.tiny_models import make_llama, save_checkpoint


@pytest.fixture(scope="session")
def target() -> Any:
    return make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="session")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(target, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def following() -> Any:
    """Another: what follows, its hidden state tells. Read only."""
    return make_target()


@pytest.fixture(scope="session")
def following_folder(following: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(following, tmp_path_factory.mktemp("following"))


@pytest.fixture
def own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's texts are such as that target writes: its hidden state does not tell what else may follow."""
    pieces = [np.array([behind(start, i) for i in range(64)]) for start in (5, 60, 200)]
    monkeypatch.setattr(head_module, "cut_checkpoint_pieces", lambda *_: pieces)
