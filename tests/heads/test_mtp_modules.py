"""MTP modules in turn: what our engines draft is what the published equations draft, and text stays the target's."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.compile.pipeline import build_bundle
from specexport.heads.trace import causal_states
from specexport.recipe import BuildRecipe
from specexport_runtime import SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from tests.support import tiny_turns
from tests.support.acceptance import accepted
from tests.support.drafted import PROMPTS, check_drafts_of
from tests.support.loading import load_module
from tests.support.rounds import check_every_round
from tests.support.tiny_modules import LAYERS


@pytest.mark.one_of_kind
@pytest.mark.parametrize("family", ["deepseek", "glm", "mimo-v2"])
@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_modules_compute_the_published_equations(family: str, own_lm_heads: bool, tmp_path: Path) -> None:
    modules = tiny_turns.make(family, tmp_path, own_lm_heads=own_lm_heads)
    _, loaded = load_module(tmp_path, LAYERS)
    config = loaded.config
    assert (config.kind, config.num_modules, config.taps) == ("mtp-modules", 3, (LAYERS,))
    assert config.shape.own_lm_heads == own_lm_heads
    tokens, features = [5, 6, 7, 200, 9, 10, 319], torch.randn(7, config.hidden_size)
    found, states = causal_states(loaded.head, torch.tensor(tokens), features), features
    for number in range(3):
        places = len(tokens) - number
        with torch.no_grad():
            wanted, states = tiny_turns.forward(modules, number, tokens[number:], states[:places])
            rows = torch.arange(places)
            logits, _ = loaded.head.guess(found, rows, torch.full_like(rows, number))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


def build(folder: Path, output: Path, **changes: Any) -> Any:
    usual = {"target": str(folder), "head": "mtp", "output": str(output), "max_model_len": 64}
    build_bundle(BuildRecipe(**(usual | changes)))
    return load_manifest(output).models["head"]


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize(("family", "own_lm_heads"), [("deepseek", False), ("mimo-v2", True)])
def test_a_bundle_drafts_what_the_modules_draft(family: str, own_lm_heads: bool, tmp_path: Path) -> None:
    modules = tiny_turns.make(family, tmp_path / "t", own_lm_heads=own_lm_heads)
    entry = build(tmp_path / "t", tmp_path / "b", check=False)
    assert (entry.draft_head.kind, entry.draft_head.num_modules) == ("mtp-modules", 3)
    drafts_are_wanted(modules, tmp_path / "b")


def drafts_are_wanted(modules: Any, bundle: Path, **options: Any) -> None:
    """In ragged batches, for every K, and for more tokens than there are modules."""
    limit = load_manifest(bundle).vocabulary.size
    with closing(SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3, **options)) as e:
        check_every_round(e)
        for lookahead in (1, 2, 3, 5):
            check_drafts_of(e, lambda *args: tiny_turns.draft(modules, *args), lookahead, limit, least=20)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Modules that are right in part: what was accepted is read again by the modules that lacked it."""
    folder = tmp_path_factory.mktemp("knowing")
    modules = tiny_turns.make("mimo-v2", folder / "t", seed=5, scale=0.02)
    build(folder / "t", folder / "b")
    return modules, folder / "b"


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}])
def test_accepted_tokens_are_read_by_all_modules(knowing: tuple[Any, Path], options: dict[str, Any]) -> None:
    modules, bundle = knowing
    assert 0.2 < accepted(bundle, PROMPTS) < 0.99
    drafts_are_wanted(modules, bundle, **options)
