"""Heads of every dialect, made on the spot: what our engines draft is what the published equations draft."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specexport.checkpoint.source import resolve_source
from specexport.compile import pipeline as pipeline_module
from specexport.compile.check_head import check_head
from specexport.compile.pipeline import build_bundle
from specexport.heads.reference import CHECK_LENS, causal_reference
from specexport.heads.trace import causal_step
from specexport.inspect import describe
from specexport.recipe import make_recipe
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import CheckFailedError, CheckpointError
from tests.support.models.head_bundles import build
from tests.support.models.loading import config_of, load
from tests.support.models.tiny_dflash import zlab
from tests.support.models.tiny_heads import (
    DIALECTS,
    HIDDEN,
    IDS,
    LAYER,
    VOCAB,
    medusa,
    medusa_tensors,
    numbered,
    speculators,
    tensors,
    write,
)
from tests.support.models.tiny_hydra import config_of_heads, hydra_plus, hydra_tensors
from tests.support.references.drafted import check_drafts
from tests.support.references.reference_head import doubled, draft, forward, project


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_computes_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    spec = DIALECTS[dialect](tmp_path, target)
    loaded = load(tmp_path, target)
    assert loaded.config.taps == (spec.taps or (AFTER_NORM,))
    states = [torch.randn(7, HIDDEN) for _ in spec.taps or [0]]
    features, tokens = loaded.projection(states), torch.tensor([5, 6, 7, 200, 9, 10, 319])
    torch.testing.assert_close(features, project(spec, states), rtol=0, atol=1e-5)
    if loaded.config.kind == "medusa":  # tokens are numbers of heads
        logits, handed_on = loaded.head(tokens, features), features
    else:
        logits, handed_on = causal_step(loaded.head, tokens, features)
    wanted_logits, wanted = forward(spec, tokens.tolist(), features)
    torch.testing.assert_close(handed_on, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-5)
    assert (None if loaded.ids is None else loaded.ids.tolist()) == spec.ids


@pytest.mark.one_of_kind
@pytest.mark.bundle
@pytest.mark.parametrize("dialect", ["speculators", "eagle", "peagle", "medusa"])  # what is read, see above
def test_a_bundle_drafts_what_the_published_equations_draft(dialect, target, target_folder, tmp_path):
    spec = DIALECTS[dialect](tmp_path / "head", target)
    bundle = build(target_folder, tmp_path, check=False)
    check_reference(bundle, spec)
    check_drafts(bundle, lambda before, count, limit: draft(spec, target, before, count, limit))


@pytest.mark.whole
@pytest.mark.bundle
def test_a_head_keeps_its_weights_where_those_of_the_target_are_rounded(target, target_folder, tmp_path):
    DIALECTS["speculators"](tmp_path / "head", target)
    manifest = load_manifest(build(target_folder, tmp_path, check=False, dtype="bfloat16"))
    assert "f32" in {name for name, *_ in manifest.models["head"].engine.weight_formats}
    lines = [line.strip().partition(":")[0] for line in describe(manifest)]
    assert lines.count("weights, rounded to bfloat16") == lines.count("weights, exact") == 1


def check_reference(bundle: Path, spec: Any) -> None:
    """The engine's logits and hidden states in ragged steps, against the equations: 1e-5."""
    generator = np.random.default_rng(4)
    entry = load_manifest(bundle).models["head"]
    tokens = [generator.integers(0, VOCAB, n) for n in CHECK_LENS]
    features = [generator.normal(0, 1, (n, entry.engine.feature_size)).astype(np.float32) for n in CHECK_LENS]
    exact, given = doubled(spec), zip(tokens, features, strict=True)
    runs = [forward(exact, ids.tolist(), torch.from_numpy(each).double()) for ids, each in given]
    logits, handed = ([run[at].float().numpy() for run in runs] for at in (0, 1))
    opened = load_bundle(bundle)
    reference = causal_reference(tokens, features, logits, handed)
    found = check_head(opened.folder, opened.manifest.models["head"], reference)
    assert found.max_abs_error <= 1e-5


@pytest.mark.parametrize("write_head", [speculators, medusa, hydra_plus, zlab])
def test_a_head_for_another_target_is_refused_by_what_differs(write_head: Any, tmp_path: Path, target: Any) -> None:
    write_head(tmp_path, target)
    with pytest.raises(CheckpointError, match="reads hidden states of 64 values, and the target's have 128"):
        config_of(tmp_path, hidden_size=128)
    with pytest.raises(CheckpointError, match="for a vocabulary of 320 tokens, and the target has 4096"):
        config_of(tmp_path, vocab_size=4096)
    if write_head is speculators:
        with pytest.raises(CheckpointError, match=r"reads layers \[1, 3, 4\], and the target has 3"):
            config_of(tmp_path, num_layers=3)


def test_damaged_files_are_refused(tmp_path: Path, target: Any) -> None:
    speculators(tmp_path, target)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        config_of(tmp_path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_pickled_heads_are_refused_with_what_converts_them(kind, tmp_path, target, monkeypatch):
    if kind == "medusa":
        config, own = {"medusa_num_heads": 3, "medusa_num_layers": 1}, numbered(medusa_tensors(3, 1), 1)
    else:
        table = target.get_input_embeddings().weight.detach().clone()
        config, own = config_of_heads(2, 3), hydra_tensors(2, 3, table)
        for part in ("weight", "bias"):  # as torch stores a block that is run again
            own[f"hydra_mlp.0.2.linear.{part}"] = own[f"hydra_mlp.0.1.linear.{part}"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(own, tmp_path / f"{kind}_lm_head.pt")
    with pytest.raises(CheckpointError, match=rf"pickled weights only \({kind}_lm_head.pt\)") as caught:
        resolve_source(str(tmp_path), None)
    command = caught.value.hint.split('python -c "')[1].split('" FILE')[0]
    assert "weights_only=True" in command
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", f"{kind}_lm_head.pt"])
    exec(command, {})
    assert set(load_file(tmp_path / "model.safetensors")) == set(own)
    assert config_of(tmp_path)[1].num_draft_heads == (3 if kind == "medusa" else 2)


def test_rows_of_an_lm_head_in_any_order_get_ascending_ids(tmp_path: Path, target: Any) -> None:
    spec = speculators(tmp_path / "a", target)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
    turned = torch.tensor(IDS)[order]
    own = {name: value for name, value in spec.tensors.items() if name != "embed_tokens.weight"}
    own |= {"lm_head.weight": own["lm_head.weight"][order], "d2t": turned - torch.arange(len(IDS))}
    write(tmp_path / "b", config, own)
    loaded, plain = load(tmp_path / "b", target), load(tmp_path / "a", target)
    assert loaded.ids.tolist() == plain.ids.tolist() == IDS
    assert torch.equal(loaded.head.lm_head.weight, plain.head.lm_head.weight)


def test_a_d2t_over_the_whole_vocabulary_only_turns_the_rows(tmp_path: Path, target: Any) -> None:
    own, order = tensors(seed=8), torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    config = {**LAYER, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    write(tmp_path / "a", config, own)
    turned = own | {"lm_head.weight": own["lm_head.weight"][order], "d2t": order - torch.arange(VOCAB)}
    write(tmp_path / "b", config, turned)
    plain, found = load(tmp_path / "a", target), load(tmp_path / "b", target)
    assert found.ids is None
    assert torch.equal(found.head.lm_head.weight, plain.head.lm_head.weight)


@pytest.mark.whole
@pytest.mark.bundle
def test_an_engine_that_computes_something_else_is_refused(target: Any, target_folder: Path, tmp_path: Path) -> None:
    spec = DIALECTS["speculators"](tmp_path / "head", target)
    bundle = build(target_folder, tmp_path, check=False)
    for name in ("layers.0.hidden_norm.weight", "layers.0.mlp.down_proj.weight", "lm_head.weight"):
        other = spec._replace(tensors={**spec.tensors, name: spec.tensors[name] * 1.5})
        with pytest.raises(CheckFailedError, match="the head's engine differs from torch"):
            check_reference(bundle, other)


def test_a_head_is_fetched_at_its_revision(target, target_folder, tmp_path, monkeypatch):
    speculators(tmp_path / "head", target)
    recipe_file, asked = tmp_path / "recipe.toml", []
    recipe_file.write_text(f'target = "{target_folder}"\nhead = "someone/head"\noutput = "{tmp_path}/b"\n')

    def snapshot_download(repo_id: str, **named: Any) -> str:
        asked.append((repo_id, named["revision"]))
        return str(tmp_path / "head")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(pipeline_module, "plan_head", lambda source, *_: pytest.fail(str(source)))
    for flags, wanted in (({}, None), ({"head_revision": "v2"}, "v2")):
        asked.clear()
        with pytest.raises(
            pytest.fail.Exception, match=f"revision={wanted!r}"
        ):  # as the head's own stages are given it
            build_bundle(make_recipe(flags, recipe_file), use_cache=False)
        assert set(asked) == {("someone/head", wanted)}
