"""A target with a draft head is loaded once, for the probe and both engines; its weights are gone before its check."""

import gc
from pathlib import Path
from typing import Any

import pytest

from specexport.checkpoint import load
from specexport.compile import head as head_module
from specexport.compile import part
from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime.errors import CheckpointError
from tests.support.models import tiny_heads
from tests.support.models.tiny_models import make_llama, save_checkpoint


@pytest.fixture
def recipe(tmp_path: Path) -> BuildRecipe:
    """Of a head that has its embedding and its LM head from its target."""
    target = make_llama(seed=3, num_hidden_layers=tiny_heads.LAYERS, hidden_size=tiny_heads.HIDDEN)
    tiny_heads.eagle(tmp_path / "head", target)
    folders = {"target": str(save_checkpoint(target, tmp_path / "target")), "head": str(tmp_path / "head")}
    return BuildRecipe(**folders, output=str(tmp_path / "out"), max_model_len=64, check=False)


@pytest.mark.whole
@pytest.mark.exports
@pytest.mark.parametrize(
    ("stream", "loads"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.whole)], ids=["from-files", "in-memory"]
)
def test_a_target_is_loaded_once_and_gone_before_its_check(stream, loads, recipe, monkeypatch):
    """Weights that are in memory are read again for the head: they are in no memory while the target is checked."""
    import torch

    found: list[set[int]] = []
    checked: list[BuildRecipe] = []
    read, obstacle = load.load_checkpoint, part.find_unchecked_reason

    def load_and_note(*args: Any, **named: Any) -> Any:
        made: Any = read(*args, **(named | {"stream": stream}))
        found.append({weight.data_ptr() for weight in made.model.parameters() if not weight.is_meta})
        return made

    def no_weight_lives(asked: BuildRecipe) -> str | None:
        if not checked:  # the target's
            kinds = (torch.Tensor, torch.nn.Parameter)
            assert not [each for each in gc.get_objects() if type(each) in kinds and each.data_ptr() in found[0]]
        checked.append(asked)
        return obstacle(asked)

    monkeypatch.setattr(load, "load_checkpoint", load_and_note)
    monkeypatch.setattr(part, "find_unchecked_reason", no_weight_lives)
    result = build_bundle(recipe, use_cache=False)
    assert sorted(result.manifest.models) == ["head", "target"]
    assert len(found) == loads
    assert found[0], "vectors are in memory"
    assert len(checked) == 2


@pytest.mark.whole
def test_a_head_that_changes_while_its_target_is_built_is_refused(recipe, monkeypatch):
    read = head_module.load_source

    def load_and_change(*args: Any, **named: Any) -> Any:
        weights = Path(str(recipe.head)) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
        return read(*args, **named)

    monkeypatch.setattr(head_module, "load_source", load_and_change)
    with pytest.raises(CheckpointError, match="checkpoint head changed while it was read"):
        build_bundle(recipe, use_cache=False)
    assert not Path(recipe.output).exists()
