"""Medusa heads: how they are read and refused, what is accepted of those that know their target, that text stays."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specexport.checkpoint.source import resolve_source
from specexport.compile import head as head_module
from specexport.compile.pipeline import build_bundle
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import open_head, read_config, trace_head
from specexport.inspect import describe
from specexport.passes.pipeline import default_passes, run_passes
from specexport.recipe import BuildRecipe
from specexport.verify.sampling import Setting, check_sampling
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.fakes.following_target import behind, make_target, rows_behind
from tests.support.models.loading import config_of, load
from tests.support.models.tiny_heads import (
    HIDDEN,
    IDS,
    LAYERS,
    VOCAB,
    edit,
    medusa,
    medusa_one_lm_head,
    medusa_tensors,
    medusa_vllm,
    numbered,
    write,
)
from tests.support.models.tiny_models import make_llama, save_checkpoint

HEADS = 3
PROMPTS = [[5, 9, 200, 17, 8], [3, 77], [250] * 4 + [12, 13, 14], [9, 8, 7]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


def knowing(target: Any, *, normed: bool = True, wrong: int = 0) -> dict[str, torch.Tensor]:
    """Heads that know this target, by vLLM's names; the last ``wrong`` of them guess one place too far."""
    table = target.get_input_embeddings().weight.detach()
    seen = table * target.state_dict()["model.norm.weight"] if normed else table
    made = {f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(HEADS)}
    for i in range(HEADS):
        made[f"lm_heads.{i}.weight"] = rows_behind(seen, i + 2 + (i >= HEADS - wrong))
    return made


CONFIG = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


@pytest.fixture
def own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's texts are such as this target writes: a Medusa head does not see what follows its hidden state."""
    pieces = [np.array([behind(start, i) for i in range(64)]) for start in (5, 60, 200)]
    monkeypatch.setattr(head_module, "pieces_for", lambda *_: pieces)


@pytest.fixture(scope="module")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(target, tmp_path_factory.mktemp("target"))


def build(target_folder: Path, tmp_path: Path, **settings: Any) -> Path:
    recipe = BuildRecipe(
        target=str(target_folder), head=str(tmp_path / "head"), output=str(tmp_path / "b"), max_model_len=64, **settings
    )
    build_bundle(recipe)
    return tmp_path / "b"


def generate(bundle: Path, lookahead: int, **params: Any) -> tuple[list[list[int]], list[list[int]], Any]:
    """Texts without and with the heads, and the statistics of the latter."""
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    given = [SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True, **params) for i in range(len(PROMPTS))]
    plain = [list(result.token_ids) for result in engine.generate(PROMPTS, given, drafter="none")]
    found = engine.generate(PROMPTS, given, drafter="head", num_speculative_tokens=lookahead)
    engine.check()
    engine.close()
    return plain, [list(result.token_ids) for result in found], [result.stats for result in found]


@pytest.mark.bundle
@pytest.mark.usefixtures("own_texts")
def test_heads_that_know_their_target_are_accepted_as_far_as_they_know(
    target: Any, target_folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "head", CONFIG, numbered(knowing(target, wrong=1), 1))
    bundle = build(target_folder, tmp_path)
    entry = load_manifest(bundle).models["head"]
    assert (entry.draft_head.guessed, entry.draft_head.reading, entry.draft_head.taps) == (1.0, None, (AFTER_NORM,))
    assert (entry.draft_head.num_draft_heads, entry.attention.layers, entry.engine.feature_size) == (HEADS, (), HIDDEN)
    assert set(entry.engine.inputs) == {"input_ids", "logit_rows", "token_features"}
    told = "\n".join(describe(load_manifest(bundle)))
    assert "draft head: 3 of medusa" in told
    assert "no attention layers" in told
    for lookahead in (2, 3, 8):  # the third head is wrong; there is no fourth
        plain, found, stats = generate(bundle, lookahead)
        assert found == plain
        whole = [stat for stat in stats if stat.drafted]
        assert sum(stat.accepted for stat in whole) >= 0.6 * sum(stat.drafted for stat in whole)
        assert all(len(text) / stat.rounds > 2.0 for text, stat in zip(found, stats, strict=True))
        assert max(stat.drafted / stat.rounds for stat in stats) <= min(lookahead, HEADS)


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_heads_draft_and_the_distribution_stays_the_targets(quantize: str, tmp_path: Path) -> None:
    model = make_llama(seed=4, num_hidden_layers=2, hidden_size=HIDDEN)
    folder = save_checkpoint(model, tmp_path / "target")
    medusa_vllm(tmp_path / "head", model)
    bundle = build(folder, tmp_path, quantize="int8", draft_quantize=quantize, check=False)
    assert load_manifest(bundle).models["head"].quantize == quantize
    for lookahead in (1, 4):  # some heads are asked nothing, then all are
        plain, found, stats = generate(bundle, lookahead)
        assert found == plain
        assert sum(stat.drafted for stat in stats) > 20
    config = {"method": "eagle3", "num_speculative_tokens": 4}  # the name that all heads have there
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, speculative_config=config)
    settings = [Setting("hot", SamplingParams(temperature=1.0, top_k=8), 3)]
    result = check_sampling(engine, PROMPTS, settings=settings, num_samples=2000, num_runs=300, num_contexts=1)
    assert result.passed, result
    engine.close()


@pytest.mark.whole
@pytest.mark.usefixtures("own_texts")
def test_the_hidden_state_before_the_norm_is_found_by_the_probe(
    target: Any, target_folder: Path, tmp_path: Path
) -> None:
    from specexport.checkpoint.source import hash_checkpoint
    from specexport.compile.part import ModelSource
    from specexport.progress import StageClock

    def plan(name: str, stored: dict[str, torch.Tensor]) -> Any:
        folder = write(tmp_path / name, CONFIG, numbered(stored, 1))
        recipe = BuildRecipe(target=str(target_folder), head=str(folder), output=str(tmp_path / "b"), max_model_len=64)
        head, whole = (
            ModelSource(role, str(path), None, path.name, hash_checkpoint(str(path)))
            for role, path in (("head", folder), ("target", target_folder))
        )
        return head_module.plan_head(recipe, head, whole, StageClock(None, 1))[0]

    found = plan("before", knowing(target, normed=False))
    assert found.config.taps == (2,)
    assert found.probe.rate == 1.0
    assert "before the last norm" in found.probe.reading.change
    with pytest.raises(CheckpointError, match=r"guesses .* of this target's tokens"):
        plan("random", medusa_tensors(HEADS, 1))


@pytest.fixture(scope="module")
def plain_target() -> Any:
    return make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.mark.parametrize(
    ("key", "value"),
    [("posterior_threshold", 0.09), ("typical_acceptance_sampler_posterior_alpha", 0.3), ("typical_acceptance", True)],
)
def test_typical_acceptance_is_refused_by_name(key: str, value: Any, tmp_path: Path, plain_target: Any) -> None:
    medusa(tmp_path, plain_target)
    edit(tmp_path, **{key: value})
    with pytest.raises(UnsupportedModelError, match=f"sets {key} to {value}: typical acceptance"):
        config_of(tmp_path)


def test_heads_for_another_target_are_refused_by_what_differs(tmp_path: Path, plain_target: Any) -> None:
    medusa(tmp_path, plain_target)
    files = open_head(resolve_source(str(tmp_path), None))
    with pytest.raises(CheckpointError, match="reads hidden states of 64 values, and the target's have 128"):
        read_config(files, TargetFacts(LAYERS, 128, VOCAB))
    with pytest.raises(CheckpointError, match="for a vocabulary of 320 tokens, and the target has 4096"):
        read_config(files, TargetFacts(LAYERS, HIDDEN, 4096))
    edit(tmp_path, medusa_num_heads=65)
    with pytest.raises(CheckpointError, match="has 65 Medusa heads of 2 blocks; 1 to 64"):
        config_of(tmp_path)
    edit(tmp_path, medusa_num_heads="three")
    with pytest.raises(CheckpointError, match="'three' for medusa_num_heads, no size"):
        config_of(tmp_path)


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path, plain_target: Any) -> None:
    own = numbered(medusa_tensors(3, 1), 1)
    write(tmp_path / "a", CONFIG, {name: value for name, value in own.items() if name != "1.0.linear.weight"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, for example 1.0.linear.weight"):
        load(tmp_path / "a", plain_target)
    write(tmp_path / "b", CONFIG | {"medusa_num_heads": 4}, own)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors, for example 3.0.linear.weight"):
        load(tmp_path / "b", plain_target)
    write(tmp_path / "c", CONFIG, own | {"2.1.weight": torch.ones(VOCAB, 63)})
    with pytest.raises(CheckpointError, match=r"2.1.weight is \[320, 63\], .* it would be \[320, 64\]"):
        load(tmp_path / "c", plain_target)
    write(tmp_path / "d", {"model_type": "medusa"}, {"strange.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="has 0 Medusa heads"):
        config_of(tmp_path / "d")


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_all_lm_heads_stay_float_where_one_would(quantize: str, tmp_path: Path, plain_target: Any) -> None:
    medusa(tmp_path, plain_target)
    passes = default_passes("float32", quantize=quantize, quantize_lm_head=False)
    model = trace_head(load(tmp_path, plain_target).head).ir_model
    run_passes(model, passes)
    kept = [name for name in model.graph.initializers if "lm_heads" in name]
    assert len(kept) == 3
    assert not any("int" in name for name in kept)
    packed = "int8" if quantize == "int8" else "group4_32_f16_zero"
    assert any(name.endswith(f".blocks.{packed}") for name in model.graph.initializers)


@pytest.mark.parametrize("ids", [None, [*IDS[:-1], IDS[0]], [*IDS[:-1], VOCAB], IDS[:-1]])
def test_a_token_map_names_the_rows_or_is_refused(ids: list[int] | None, tmp_path: Path, plain_target: Any) -> None:
    medusa_vllm(tmp_path, plain_target)
    config = json.loads((tmp_path / "config.json").read_text())
    extra = {} if ids is None else {"token_map": torch.tensor(ids)}
    write(tmp_path, config, medusa_tensors(4, 1, rows=len(IDS), seed=9) | extra)
    with pytest.raises(CheckpointError, match="no token_map that says which" if ids is None else "does not name"):
        load(tmp_path, plain_target)


def test_lm_heads_of_all_tokens_are_cut_by_the_token_map(tmp_path: Path, plain_target: Any) -> None:
    medusa_vllm(tmp_path, plain_target)
    config = json.loads((tmp_path / "config.json").read_text())
    own = medusa_tensors(4, 1, seed=9)
    write(tmp_path, config, own | {"token_map": torch.tensor(IDS)})
    loaded = load(tmp_path, plain_target)
    assert loaded.ids.tolist() == IDS
    assert torch.equal(loaded.head.lm_heads[2].weight, own["lm_heads.2.weight"][IDS])
    medusa_one_lm_head(tmp_path / "one", plain_target)
    one = load(tmp_path / "one", plain_target).head
    assert len(one.lm_heads) == 1
    assert len(one.blocks) == 2


def test_pickled_heads_are_refused_with_what_converts_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(numbered(medusa_tensors(3, 1), 1), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(medusa_lm_head.pt\)") as caught:
        resolve_source(str(tmp_path), None)
    command = caught.value.hint.split('python -c "')[1].split('" FILE')[0]
    assert "weights_only=True" in command

    subprocess.run([sys.executable, "-c", command, "medusa_lm_head.pt"], check=True, cwd=tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(numbered(medusa_tensors(3, 1), 1))
    assert config_of(tmp_path)[1].num_draft_heads == 3
