"""MTP modules in checkpoints of every family: what our engines draft is what the published equations draft."""

from pathlib import Path
from typing import Any

import pytest
import tiny_modules
import torch
from drafted import check_drafts

from specexport.build.pipeline import build_bundle
from specexport.frontend import load_checkpoint
from specexport.frontend.source import resolve_source
from specexport.heads.load import TargetTables, load_head
from specexport.heads.mtp_files import open_mtp
from specexport.heads.read import read_config
from specexport.heads.trace import causal_step
from specexport.recipe import BuildRecipe
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.manifest import load_manifest


def load(folder: Path) -> tuple[Any, Any]:
    """The target of a folder and its module."""
    model: Any = load_checkpoint(str(folder), dtype="float32").model
    values = model.config.get_text_config().to_dict()
    files = open_mtp(resolve_source(str(folder), None), values)
    width, vocab = values["hidden_size"], values["vocab_size"]
    config = read_config(files, num_layers=tiny_modules.LAYERS, target_hidden_size=width, vocab_size=vocab)
    tables = TargetTables(*(t.weight.detach() for t in (model.get_input_embeddings(), model.get_output_embeddings())))
    return model, load_head(files, config, tables, torch.float32)


@pytest.mark.parametrize("family", tiny_modules.FAMILIES)
def test_a_module_computes_the_published_equations(family: str, tmp_path: Path) -> None:
    module = tiny_modules.make(family, tmp_path)
    _, loaded = load(tmp_path)
    config = loaded.config
    assert (config.kind, config.taps, config.num_layers) == ("mtp", (AFTER_NORM,), 1)
    assert (config.feature_first, config.norm_output) == (module.feature_first, module.norm_output)
    features, tokens = torch.randn(7, config.hidden_size), torch.tensor([5, 6, 7, 200, 9, 10, 319])
    with torch.no_grad():
        wanted_logits, wanted = tiny_modules.forward(module, tokens, features)
    logits, handed_on = causal_step(loaded.head, tokens, features)
    torch.testing.assert_close(handed_on, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-5)


@pytest.mark.bundle
@pytest.mark.parametrize("family", tiny_modules.FAMILIES)
def test_a_bundle_drafts_what_the_module_drafts(family: str, tmp_path: Path) -> None:
    module = tiny_modules.make(family, tmp_path / "t")
    build_bundle(
        BuildRecipe(target=str(tmp_path / "t"), head="mtp", output=str(tmp_path / "b"), max_model_len=64, check=False)
    )
    entry = load_manifest(tmp_path / "b").models["head"]
    assert (entry.head_kind, entry.taps) == ("mtp", (AFTER_NORM,))
    check_drafts(tmp_path / "b", lambda before, count, limit: tiny_modules.draft(module, before, count, limit))
