"""Hydra heads: how they are read and refused, and that they draft what the published equations draft."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from specexport.checkpoint.source import hash_checkpoint
from specexport.compile import head as head_module
from specexport.compile.part import ModelSource
from specexport.heads.hydra import find_row_heads
from specexport.heads.trace import causal_states
from specexport.inspect import describe
from specexport.progress import StageClock
from specexport.recipe import BuildRecipe, resolve_parts
from specexport.verify.logit_tree import HeadTree
from specexport_runtime.abi import AFTER_NORM, CONTEXT_ID
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.fakes.following_target import rows_behind
from tests.support.models.head_bundles import build, opened
from tests.support.models.loading import config_of, load, load_head, tables_of
from tests.support.models.tiny_heads import HIDDEN, VOCAB, write
from tests.support.models.tiny_hydra import DIALECTS, config_of_heads, hydra_plus, hydra_tensors, with_dropout
from tests.support.references.drafted import PROMPTS, check_drafts
from tests.support.references.reference_hydra import HydraSpec, draft, guess, stream


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_heads_compute_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    spec = DIALECTS[dialect](tmp_path, target)
    loaded = load(tmp_path, target)
    assert loaded.config.taps == tuple(AFTER_NORM if tap < 0 else tap for tap in spec.taps)
    assert loaded.config.shape.one_block == (dialect == "hydra-plus")
    features = torch.randn(7, HIDDEN)
    found = causal_states(loaded.head, torch.zeros(7, dtype=torch.int64), features)
    wanted = stream(spec, features)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for number in range(spec.heads):
        windows = torch.randint(0, VOCAB, (7, number + 1))
        logits = loaded.head.guess(number, found, loaded.head.embed_tokens(windows))
        for row, window in enumerate(windows.tolist()):
            torch.testing.assert_close(logits[row], guess(spec, wanted[row], window), rtol=0, atol=1e-5)


def test_a_row_asks_the_head_that_reads_the_tokens_it_ends_in() -> None:
    context = CONTEXT_ID
    ids = torch.tensor([context, context, 5, 7, 8, 9, context, 4, 4])
    begins = torch.tensor([0, 3, 6, 6, 7, 9], dtype=torch.int32)  # the third of five sequences has nothing to do
    rows = torch.tensor([2, 4, 5, 6, 8, 1])
    assert find_row_heads(ids, rows, begins).tolist() == [0, 1, 2, -1, 1, -1]


@pytest.fixture(scope="module")
def bundle_of(target: Any, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(dialect: str) -> tuple[Path, HydraSpec]:
        folder = tmp_path_factory.mktemp(dialect)
        spec = DIALECTS[dialect](folder / "head", target)
        return build(target_folder, folder, check=False), spec

    return make


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("dialect", ["hydra", "hydra-plus"])  # what is read, see above
def test_a_bundle_drafts_what_the_published_equations_draft(dialect: str, target: Any, bundle_of: Any) -> None:
    bundle, spec = bundle_of(dialect)
    entry = load_manifest(bundle).models["head"]
    assert (entry.draft_head.kind, entry.draft_head.num_draft_heads, entry.engine.feature_size) == (
        "hydra",
        spec.heads,
        HIDDEN,
    )
    assert len(entry.attention.layers) == int(spec.prefix is not None)
    assert f"draft head: {spec.heads} of hydra" in "\n".join(describe(load_manifest(bundle)))
    check_drafts(bundle, lambda before, count, limit: draft(spec, target, before, count, limit), 5)
    if spec.prefix is not None:
        check_prefix_is_left_out(bundle)


def check_prefix_is_left_out(bundle: Path) -> None:
    """A step of later heads writes no cache entry, for it runs no layer; one of first heads does."""
    generator = np.random.default_rng(3)
    fresh = generator.normal(0, 1, (3, HIDDEN)).astype(np.float32)
    with opened(bundle) as engine:
        executor = engine.head
        runner = ModelRunner(executor)

        def written() -> bool:
            return any(entries.any() for entries in executor.read_cache_entries(0, 3, 6).values())

        runner.step(0, [RowWork([CONTEXT_ID, CONTEXT_ID, 9], 1, fresh)])
        runner.kv.commit(0, 3)
        assert not written()
        runner.step(0, [RowWork([9, 8, 7], 1, fresh)])
        assert not written()
        runner.step(0, [RowWork([CONTEXT_ID, CONTEXT_ID, 9], 1, fresh)])
        assert written()


@pytest.mark.whole
@pytest.mark.bundle
def test_a_tree_of_logits_is_what_the_heads_say(target: Any, bundle_of: Any) -> None:
    bundle, spec = bundle_of("hydra")
    with torch.no_grad():
        features = target(torch.tensor([PROMPTS[2][:-1]]), output_hidden_states=True).hidden_states[-1][0]
    state = stream(spec, features)[-1]
    with opened(bundle) as engine:
        tree = HeadTree(engine.target, engine.head, PROMPTS[2])
        for path in ((), (7,), (7, 9)):
            wanted = guess(spec, state, [PROMPTS[2][-1], *path]).numpy()
            np.testing.assert_allclose(tree(path), wanted, rtol=0, atol=1e-4)


HEADS = 3


def knowing(target: Any, *, normed: bool) -> dict[str, torch.Tensor]:
    """Heads that know of :func:`make_target`'s hidden state, after its norm or before it, what follows."""
    table = target.get_input_embeddings().weight.detach()
    made = {name: torch.zeros_like(value) for name, value in hydra_tensors(HEADS, 1, table).items()}
    made["input_embed_fn.weight"] = table.clone()
    seen = table * target.state_dict()["model.norm.weight"] if normed else table
    for i in range(HEADS):
        made[f"hydra_mlp.{i}.0.res_connection.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
        made[f"hydra_lm_head.{i}.weight"] = rows_behind(seen, i + 2)
    return made


@pytest.mark.whole
@pytest.mark.usefixtures("own_texts")
def test_the_probe_finds_the_hidden_state_and_refuses_chance(following, following_folder, tmp_path):
    def plan(name: str, stored: dict[str, torch.Tensor], **values: Any) -> Any:
        folder = write(tmp_path / name, config_of_heads(HEADS, 1, **values), stored)
        recipe = BuildRecipe(
            target=str(following_folder), head=str(folder), output=str(tmp_path / "b"), max_model_len=64
        )
        head, whole = (
            ModelSource(role, str(path), None, path.name, hash_checkpoint(str(path)))
            for role, path in (("head", folder), ("target", following_folder))
        )
        part = resolve_parts(recipe, {"target": False})["target"]
        return head_module.plan_head(head, part, whole, StageClock(None, 1))[0]

    found = plan("before", knowing(following, normed=False))
    assert found.config.taps == (2,)
    assert found.probe.rate == 1.0
    assert "before the last norm" in found.probe.reading.change
    found = plan("normed", knowing(following, normed=True), hidden_state_offset=0)
    assert (found.config.taps, found.probe.reading.change) == ((AFTER_NORM,), "")
    table = following.get_input_embeddings().weight.detach()
    with pytest.raises(CheckpointError, match=r"guesses .* of this target's tokens"):
        plan("random", hydra_tensors(HEADS, 1, table))


def test_a_prefix_layer_of_another_kind_than_the_targets_is_refused(target: Any, tmp_path: Path) -> None:
    hydra_plus(tmp_path / "head", target)
    with pytest.raises(UnsupportedModelError, match="this target's layers are of qwen3"):
        config_of(tmp_path / "head", text=AutoConfig.for_model("qwen3"))


@pytest.mark.parametrize("broken", [{"num_attention_heads": 0, "head_dim": None}, {"hidden_act": "unheard-of"}])
def test_a_prefix_layer_that_cannot_be_made_is_told(target: Any, tmp_path: Path, broken: dict[str, Any]) -> None:
    hydra_plus(tmp_path, target)
    files, config = config_of(tmp_path, text=target.config)
    odd = replace(config, layer_config={**config.layer_config, **broken})
    with pytest.raises(CheckpointError, match="no prefix layer can be made of the target's configuration"):
        load_head(files, odd, tables_of(target))


def test_a_block_that_is_run_again_may_be_stored_once(target: Any, tmp_path: Path) -> None:
    table = target.get_input_embeddings().weight.detach().clone()
    own = with_dropout(hydra_tensors(2, 4, table))
    once = {name: value for name, value in own.items() if not name.startswith(("hydra_mlp.0.3", "hydra_mlp.0.7"))}
    features, windows = torch.randn(4, HIDDEN), torch.randint(0, VOCAB, (4, 1, 1))
    found = []
    differ = hydra_tensors(2, 3, table, one_block=False)
    write(tmp_path / "differ", config_of_heads(2, 4), differ)
    with pytest.raises(CheckpointError, match=r"lacks 4 tensors, for example hydra_mlp.0.3.linear.bias"):
        load(tmp_path / "differ", target)
    for name, stored in (("whole", own), ("once", once)):
        write(tmp_path / name, config_of_heads(2, 4), stored)
        head = load(tmp_path / name, target).head
        found.append(head.guess(0, features, head.embed_tokens(windows[:, 0])))
    assert torch.equal(*found)
