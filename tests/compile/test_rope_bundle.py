"""Bundles of a model with two rotary tables: which one they have, where they say so, and what they are held against."""

from pathlib import Path

import numpy as np
import pytest

from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe
from specexport.recipe import BuildRecipe
from specexport.verify.checkpoint import EagerModel, eager_references
from tests.support.models.tiny_models import BY_LENGTH, make_model, save_checkpoint

SEQUENCE = [[5, 17, 250, 9, 31, 77, 123, 4, 8, 15, 16, 23, 42]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model(*BY_LENGTH["phi3_longrope"]), tmp_path_factory.mktemp("rope") / "model")


@pytest.mark.whole
def test_a_bundle_has_the_table_of_its_length_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    found = {}
    for length in ("auto", 48):
        recipe = BuildRecipe(target=str(checkpoint), output=str(tmp_path / str(length)), max_model_len=length)
        result = build_bundle(recipe, progress=lambda event: notes.append(event.message))
        entry = result.manifest.models["target"]
        found[length] = result.manifest.max_model_len, *entry.rope
        assert result.reused == (), "an engine of another length has another table"
    assert found == {"auto": (32, "longrope: the short factors", 32), 48: (48, "longrope: the long factors", 48)}
    line = "longrope: the long factors, for sequences of up to 48 tokens"
    assert line in notes
    assert f"  rope: {line}" in list(describe(result.manifest))


@pytest.mark.whole
def test_verify_holds_an_engine_against_its_own_table(checkpoint: Path) -> None:
    logits = {
        length: eager_references(EagerModel(str(checkpoint), "float32", rope_len=length), SEQUENCE)[0]
        for length in (None, 32, 48)
    }
    np.testing.assert_array_equal(logits[None], logits[32])
    assert np.abs(logits[48] - logits[32]).max() > 0.01
