"""Hydra heads: how they are read and refused, and that they draft what the published equations draft."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from specexport.checkpoint.source import hash_checkpoint, resolve_source
from specexport.compile import head as head_module
from specexport.compile.check_head import check_head
from specexport.compile.part import ModelSource
from specexport.compile.pipeline import build_bundle
from specexport.heads.hydra import heads_asked, hydra_steps
from specexport.heads.trace import causal_states
from specexport.inspect import describe
from specexport.progress import StageClock
from specexport.recipe import BuildRecipe
from specexport.verify.logit_tree import HeadTree
from specexport.verify.sampling import Setting, check_sampling
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.abi import AFTER_NORM, CONTEXT_ID
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import CheckFailedError, CheckpointError, UnsupportedModelError
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.fakes.following_target import behind, make_target, rows_behind
from tests.support.models.loading import config_of, load, load_head, tables_of
from tests.support.models.tiny_heads import HIDDEN, LAYERS, VOCAB, write
from tests.support.models.tiny_hydra import DIALECTS, config_of_heads, hydra, hydra_plus, hydra_tensors, with_dropout
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.references.drafted import PROMPTS, check_drafts
from tests.support.references.reference_hydra import HydraSpec, draft, guess, stream


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(target, tmp_path_factory.mktemp("target"))


def build(target_folder: Path, head: Path, output: Path, **settings: Any) -> Path:
    recipe = BuildRecipe(target=str(target_folder), head=str(head), output=str(output), max_model_len=64, **settings)
    build_bundle(recipe)
    return output


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
    assert heads_asked(ids, rows, begins).tolist() == [0, 1, 2, -1, 1, -1]


@pytest.fixture(scope="module")
def bundle_of(target: Any, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the bundle of a dialect, and what it should compute."""

    @functools.cache
    def make(dialect: str) -> tuple[Path, HydraSpec]:
        folder = tmp_path_factory.mktemp(dialect)
        spec = DIALECTS[dialect](folder / "head", target)
        return build(target_folder, folder / "head", folder / "b", check=False), spec

    return make


def check_reference(bundle: Path, spec: HydraSpec) -> None:
    """The engine's logits and hidden states in ragged steps, against the equations: 1e-5."""

    def compute(features: np.ndarray, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
        state = stream(spec, torch.from_numpy(features))[-1]
        return guess(spec, state, tokens).numpy(), state.numpy()

    opened = load_bundle(bundle)
    reference = hydra_steps(compute, spec.heads, HIDDEN, VOCAB)
    found = check_head(opened.folder, opened.manifest.models["head"], reference)
    assert found.max_abs_error <= 1e-5


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
    check_reference(bundle, spec)
    check_drafts(bundle, lambda before, count, limit: draft(spec, target, before, count, limit), 5)
    if spec.prefix is not None:
        check_prefix_is_left_out(bundle)


def check_prefix_is_left_out(bundle: Path) -> None:
    """A step of later heads writes no cache entry, for it runs no layer; one of first heads does."""
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    executor, generator = engine.head, np.random.default_rng(3)
    runner = ModelRunner(executor)
    fresh = generator.normal(0, 1, (3, HIDDEN)).astype(np.float32)

    def written() -> bool:
        return any(entries.any() for entries in executor.cache_entries(0, 3, 6).values())

    runner.step(0, [RowWork([CONTEXT_ID, CONTEXT_ID, 9], 1, fresh)])
    runner.kv.commit(0, 3)
    assert not written()
    runner.step(0, [RowWork([9, 8, 7], 1, fresh)])
    assert not written()
    runner.step(0, [RowWork([CONTEXT_ID, CONTEXT_ID, 9], 1, fresh)])
    assert written()
    engine.close()


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_heads_draft_and_the_distribution_stays_the_targets(
    quantize: str, target: Any, target_folder: Path, tmp_path: Path
) -> None:
    hydra_plus(tmp_path / "head", target)
    bundle = build(target_folder, tmp_path / "head", tmp_path / "b", draft_quantize=quantize, check=False)
    assert load_manifest(bundle).models["head"].quantize == quantize
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    params = [SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain = [result.token_ids for result in engine.generate(PROMPTS, params, drafter="none")]
    for lookahead in (1, 3, 8):
        found = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=lookahead)
        assert [result.token_ids for result in found] == plain
        assert sum(result.stats.drafted for result in found) > 20
    settings = [Setting("hot", SamplingParams(temperature=1.0, top_k=8), 3)]
    result = check_sampling(engine, PROMPTS, settings=settings, num_samples=2000, num_runs=300, num_contexts=1)
    assert result.passed, result
    assert result.has_power
    engine.close()


@pytest.mark.whole
@pytest.mark.bundle
def test_the_check_and_the_sampling_test_see_what_the_heads_say(target: Any, bundle_of: Any) -> None:
    bundle, spec = bundle_of("hydra")
    for name in ("hydra_mlp.1.0.linear.weight", "hydra_mlp.2.0.res_connection.bias", "hydra_lm_head.0.weight"):
        other = spec._replace(tensors={**spec.tensors, name: spec.tensors[name] * 1.5})
        with pytest.raises(CheckFailedError, match="the head's engine differs from torch"):
            check_reference(bundle, other)
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    tree = HeadTree(engine.target, engine.head, PROMPTS[2])
    with torch.no_grad():
        features = target(torch.tensor([PROMPTS[2][:-1]]), output_hidden_states=True).hidden_states[-1][0]
    state = stream(spec, features)[-1]
    for path in ((), (7,), (7, 9)):
        wanted = guess(spec, state, [PROMPTS[2][-1], *path]).numpy()
        np.testing.assert_allclose(tree(path), wanted, rtol=0, atol=1e-4)
    engine.close()


HEADS = 3


def knowing(target: Any, *, reads: str, wrong: int = 0) -> dict[str, torch.Tensor]:
    """Heads that know what follows in :func:`make_target`, of the last token that they read (``reads="token"``), or of
    the hidden state (``"normed"``, ``"before"``); the last ``wrong`` of them guess one place too far."""
    table = target.get_input_embeddings().weight.detach()
    made = {name: torch.zeros_like(value) for name, value in hydra_tensors(HEADS, 1, table).items()}
    made["input_embed_fn.weight"] = table.clone()
    seen = table * target.state_dict()["model.norm.weight"] if reads == "normed" else table
    for i in range(HEADS):
        at = HIDDEN * (i + 1) if reads == "token" else 0
        made[f"hydra_mlp.{i}.0.res_connection.weight"][:, at : at + HIDDEN] = torch.eye(HIDDEN)
        steps = (1 if reads == "token" else i + 2) + (i >= HEADS - wrong)
        made[f"hydra_lm_head.{i}.weight"] = rows_behind(seen, steps)
    return made


@pytest.fixture(scope="module")
def following() -> Any:
    return make_target()


@pytest.fixture(scope="module")
def following_folder(following: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(following, tmp_path_factory.mktemp("following"))


@pytest.fixture
def own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's texts are such as this target writes: its hidden state does not tell what else may follow."""
    pieces = [np.array([behind(start, i) for i in range(64)]) for start in (5, 60, 200)]
    monkeypatch.setattr(head_module, "pieces_for", lambda *_: pieces)


@pytest.mark.whole
@pytest.mark.bundle
def test_heads_that_know_their_target_are_accepted_as_far_as_they_know(
    following: Any, following_folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "head", config_of_heads(HEADS, 1), knowing(following, reads="token", wrong=1))
    bundle = build(following_folder, tmp_path / "head", tmp_path / "b")
    entry = load_manifest(bundle).models["head"]
    assert (entry.draft_head.guessed, entry.draft_head.reading, entry.draft_head.taps) == (1.0, None, (AFTER_NORM,))
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    plain = [result.token_ids for result in engine.generate(PROMPTS, params, drafter="none")]
    for lookahead in (2, 8):  # the third head is wrong; there is no fourth
        found = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=lookahead)
        assert [result.token_ids for result in found] == plain
        for stats in (result.stats for result in found):
            assert stats.accepted >= 0.6 * stats.drafted
            assert stats.drafted / stats.rounds <= min(lookahead, HEADS)
            assert 18 / stats.rounds > 2.0
    engine.close()


@pytest.mark.whole
@pytest.mark.usefixtures("own_texts")
def test_the_probe_finds_the_hidden_state_and_refuses_chance(
    following: Any, following_folder: Path, tmp_path: Path
) -> None:
    def plan(name: str, stored: dict[str, torch.Tensor], **values: Any) -> Any:
        folder = write(tmp_path / name, config_of_heads(HEADS, 1, **values), stored)
        recipe = BuildRecipe(
            target=str(following_folder), head=str(folder), output=str(tmp_path / "b"), max_model_len=64
        )
        head, whole = (
            ModelSource(role, str(path), None, path.name, hash_checkpoint(str(path)))
            for role, path in (("head", folder), ("target", following_folder))
        )
        return head_module.plan_head(recipe, head, whole, StageClock(None, 1))[0]

    found = plan("before", knowing(following, reads="before"))
    assert found.config.taps == (2,)
    assert found.probe.rate == 1.0
    assert "before the last norm" in found.probe.reading.change
    found = plan("normed", knowing(following, reads="normed"), hidden_state_offset=0)
    assert (found.config.taps, found.probe.reading.change) == ((AFTER_NORM,), "")
    table = following.get_input_embeddings().weight.detach()
    with pytest.raises(CheckpointError, match=r"guesses .* of this target's tokens"):
        plan("random", hydra_tensors(HEADS, 1, table))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"posterior_threshold": 0.09}, UnsupportedModelError, "sets posterior_threshold to 0.09: typical acceptance"),
        ({"posterior_alpha": 0.3}, UnsupportedModelError, "sets posterior_alpha to 0.3: typical acceptance"),
        ({"hydra_head_arch": "eagle-attn"}, UnsupportedModelError, "architecture 'eagle-attn', which cannot"),
        ({"hydra_head_arch": "cross-attn"}, UnsupportedModelError, "architecture 'cross-attn', which cannot"),
        ({"grounded_heads": False}, UnsupportedModelError, "heads that are not grounded"),
        ({"hydra_num_heads": "three"}, CheckpointError, "'three' for hydra_num_heads, no size"),
        ({"hydra_num_heads": 65}, CheckpointError, "has 65 Hydra heads of 2 blocks; 1 to 64"),
        ({"hydra_num_layers": 0}, CheckpointError, "has 3 Hydra heads of 0 blocks"),
        ({"hidden_state_offset": 7}, CheckpointError, "reads the hidden state 7 layers before the last, .* has 6"),
        ({"hydra_num_heads": 4}, CheckpointError, r"lacks 8 tensors, for example hydra_lm_head.3.bias"),
        (
            {"hydra_num_layers": 1},
            UnsupportedModelError,
            "6 tensors that Hydra heads do not have, for example hydra_mlp.0.1",
        ),
        ({"hydra_head_arch": "prefix-mlp"}, CheckpointError, "lacks .* for example prefix_embeding_layer.layers.0"),
    ],
)
def test_odd_configurations_are_told(
    values: dict[str, Any], error: type[Exception], message: str, target: Any, tmp_path: Path
) -> None:
    spec = DIALECTS["hydra"](tmp_path, target)
    write(tmp_path, config_of_heads(3, 2) | values, dict(spec.tensors))
    with pytest.raises(error, match=message):
        load(tmp_path, target)


def test_heads_for_another_target_are_refused_by_what_differs(target: Any, tmp_path: Path) -> None:
    hydra_plus(tmp_path / "head", target)
    with pytest.raises(CheckpointError, match="reads hidden states of 64 values, and the target's have 128"):
        config_of(tmp_path / "head", hidden_size=128)
    with pytest.raises(CheckpointError, match="for a vocabulary of 320 tokens, and the target has 4096"):
        config_of(tmp_path / "head", vocab_size=4096)
    with pytest.raises(UnsupportedModelError, match="this target's layers are of qwen3"):
        config_of(tmp_path / "head", text=AutoConfig.for_model("qwen3"))


def test_what_is_misshapen_or_strange_is_named(target: Any, tmp_path: Path) -> None:
    spec = hydra(tmp_path / "head", target)
    config = config_of_heads(3, 2)
    write(tmp_path / "a", config, {**spec.tensors, "hydra_mlp.1.0.linear.bias": torch.ones(63)})
    with pytest.raises(CheckpointError, match=r"hydra_mlp.1.0.linear.bias is \[63\], .* it would be \[64\]"):
        load(tmp_path / "a", target)
    write(tmp_path / "b", config, {**spec.tensors, "hydra_mlp.1.gate.weight": torch.ones(1, 1)})
    with pytest.raises(UnsupportedModelError, match=r"do not have, for example hydra_mlp\.1\.gate"):
        load(tmp_path / "b", target)


@pytest.mark.parametrize("broken", [{"num_attention_heads": 0, "head_dim": None}, {"hidden_act": "unheard-of"}])
def test_a_prefix_layer_that_cannot_be_made_is_told(target: Any, tmp_path: Path, broken: dict[str, Any]) -> None:
    hydra_plus(tmp_path, target)
    files, config = config_of(tmp_path, text=target.config)
    odd = replace(config, layer_config={**config.layer_config, **broken})
    with pytest.raises(CheckpointError, match="no prefix layer can be made of the target's configuration"):
        load_head(files, odd, tables_of(target))


def test_an_lm_head_that_is_no_matrix_is_named(target: Any, tmp_path: Path) -> None:
    spec = hydra(tmp_path / "head", target)
    write(tmp_path / "a", config_of_heads(3, 2), {**spec.tensors, "hydra_lm_head.0.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"hydra_lm_head.0.weight is \[64\], .* it would be \[320, 64\]"):
        load(tmp_path / "a", target)


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


def test_pickled_heads_are_refused_with_what_converts_them(target: Any, tmp_path: Path) -> None:
    table = target.get_input_embeddings().weight.detach().clone()
    own = hydra_tensors(2, 3, table)
    for part in ("weight", "bias"):  # as torch stores a block that is run again
        own[f"hydra_mlp.0.2.linear.{part}"] = own[f"hydra_mlp.0.1.linear.{part}"]
    (tmp_path / "config.json").write_text(json.dumps(config_of_heads(2, 3)))
    torch.save(own, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(hydra_lm_head.pt\)") as caught:
        resolve_source(str(tmp_path), None)
    command = caught.value.hint.split('python -c "')[1].split('" FILE')[0]
    subprocess.run([sys.executable, "-c", command, "hydra_lm_head.pt"], check=True, cwd=tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(own)
    assert config_of(tmp_path)[1].shape == (2, True, False)
