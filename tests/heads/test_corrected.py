"""DFlash 2 and DSpark heads, made on the spot: what our engines draft is what the published equations draft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.compile.pipeline import build_bundle
from specexport.heads.dflash import block_states
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.arrays import CorrectionTables, CutHead, MaskInput
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.drafters.correction import corrector_of
from tests.support.drafted import PROMPTS
from tests.support.loading import load
from tests.support.reference_corrected import Walk, context_of, draft, logits_of, states_of
from tests.support.tiny_corrected import DIALECTS
from tests.support.tiny_dflash import MASK
from tests.support.tiny_heads import HIDDEN, LAYERS
from tests.support.tiny_models import make_llama, save_checkpoint


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(target, tmp_path_factory.mktemp("target"))


def mask_of(loaded: Any) -> MaskInput:
    """What the drafter of a loaded head reads, as a bundle gives it."""
    config, made = loaded.config, loaded.correction
    tables = CorrectionTables(made.rule, dict(made.tables), made.most)
    return MaskInput(config.mask_token_id, np.zeros(HIDDEN, np.float32), config.block_size, config.from_anchor, tables)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_computes_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    spec = DIALECTS[dialect](tmp_path, target)
    block, loaded = spec.block, load(tmp_path, target)
    config = loaded.config
    assert (config.taps, config.block_size, config.mask_token_id) == (block.taps, block.block_size, block.mask)
    assert (config.from_anchor, config.shape.causal) == (spec.from_anchor, tuple(block.causal))
    features = [torch.randn(9, HIDDEN) for _ in block.taps]
    context = loaded.projection(features)
    torch.testing.assert_close(context, context_of(block, features), rtol=0, atol=1e-5)
    blocks = torch.tensor([[5, MASK, MASK, MASK], [7, MASK, MASK, MASK], [200, 9, 8, 11]])
    starts = torch.tensor([9, 4, 1])  # blocks behind a part of the context see no more than it
    found = block_states(loaded.head, context, starts, blocks)
    order = slice(None) if block.ids is None else np.argsort(block.ids)
    for start, ids, state in zip(starts.tolist(), blocks, found, strict=True):
        wanted = states_of(spec, context[:start], ids.tolist())
        logits, normed = loaded.head.read(state)
        torch.testing.assert_close(normed, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, logits_of(spec, wanted)[:, order], rtol=0, atol=2e-5)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_corrected_by_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    """Whatever the tokens in front are: those that were likely, and others."""
    spec = DIALECTS[dialect](tmp_path, target)
    loaded = load(tmp_path, target)
    ids, count = loaded.ids, spec.block.block_size - (not spec.from_anchor)
    cut = None if ids is None else CutHead(ids, len(spec.block.tensors["embed_tokens.weight"]))
    corrector = corrector_of(mask_of(loaded), cut)
    context, generator, changed = torch.randn(6, HIDDEN), np.random.default_rng(5), 0
    for likely in (0.0, 0.5, 1.0):
        walk = Walk(spec, context, 17, count)
        rows = walk.logits if ids is None else walk.logits[:, np.argsort(spec.block.ids)]
        correction = corrector.begin(rows.numpy(), walk.states.numpy(), 17)
        drafted: list[int] = []
        for place in range(count):
            before = drafted[-1] if drafted else 17
            if spec.confidence:
                assert correction.confidence(drafted) == pytest.approx(walk.confidence(before), abs=1e-6)
            wanted = walk(before).numpy()
            wanted = wanted if ids is None else wanted[ids]
            found = correction.logits(drafted)
            assert (np.isfinite(found) == np.isfinite(wanted)).all()
            np.testing.assert_allclose(found[np.isfinite(found)], wanted[np.isfinite(wanted)], rtol=0, atol=2e-5)
            changed += int(found.argmax() != rows[place].argmax())
            best = int(found.argmax()) if generator.random() < likely else int(generator.integers(len(found)))
            drafted.append(best if ids is None else int(ids[best]))
        again = correction.logits(drafted[:2]).copy()  # places may be looked at again
        np.testing.assert_array_equal(again, correction.logits(drafted[:2]))
    assert changed > count  # the tables matter


def build(target_folder: Path, folder: Path, **options: Any) -> Path:
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


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_bundle_drafts_what_the_published_equations_draft(
    dialect: str, target: Any, target_folder: Path, tmp_path: Path
) -> None:
    spec = DIALECTS[dialect](tmp_path / "head", target)
    bundle = build(target_folder, tmp_path, check=False)
    engine = SpecEngine.load(
        bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3, max_num_batched_tokens=4
    )
    watch, params = Watch(), SamplingParams(max_tokens=14, ignore_eos=True)
    engine.add_observer(watch)
    plain = [list(result.token_ids) for result in engine.generate(PROMPTS, params, drafter="none")]
    watch.rounds.clear()
    limit = load_manifest(bundle).vocabulary.size
    found = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=8)
    assert [list(result.token_ids) for result in found] == plain
    drafts = [(before, drafted) for before, drafted in watch.rounds if drafted]
    assert max(len(drafted) for _, drafted in drafts) == spec.block.block_size - (not spec.from_anchor)
    for before, drafted in drafts:
        assert drafted == draft(spec, target, before, len(drafted), limit), before
    assert sum(len(drafted) for _, drafted in drafts) > 60
    engine.check()
    engine.close()
