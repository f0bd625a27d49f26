"""Medusa heads: how they are read and refused, and what is accepted of those that know their target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.heads.kinds import trace_head
from specexport.inspect import describe
from specexport.passes.pipeline import default_passes, run_passes
from specexport_runtime import SamplingParams
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.fakes.following_target import rows_behind
from tests.support.models.head_bundles import build, opened
from tests.support.models.loading import load
from tests.support.models.tiny_heads import (
    HIDDEN,
    IDS,
    medusa,
    medusa_one_lm_head,
    medusa_tensors,
    medusa_vllm,
    numbered,
    write,
)
from tests.support.references.drafted import PROMPTS, check_text

HEADS = 3


def knowing(target: Any) -> dict[str, torch.Tensor]:
    """Heads that know this target, by vLLM's names; the last of them guesses one place too far."""
    seen = target.get_input_embeddings().weight.detach() * target.state_dict()["model.norm.weight"]
    made = {f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(HEADS)}
    for i in range(HEADS):
        made[f"lm_heads.{i}.weight"] = rows_behind(seen, i + 2 + (i == HEADS - 1))
    return made


CONFIG = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


@pytest.mark.bundle
@pytest.mark.usefixtures("own_texts")
def test_heads_that_know_their_target_are_accepted_as_far_as_they_know(following, following_folder, tmp_path):
    write(tmp_path / "head", CONFIG, numbered(knowing(following), 1))
    bundle = build(following_folder, tmp_path)
    entry = load_manifest(bundle).models["head"]
    assert (entry.draft_head.guessed, entry.draft_head.reading, entry.draft_head.taps) == (1.0, None, (AFTER_NORM,))
    assert (entry.draft_head.num_draft_heads, entry.attention.layers, entry.engine.feature_size) == (HEADS, (), HIDDEN)
    assert set(entry.engine.inputs) == {"input_ids", "logit_rows", "token_features"}
    told = "\n".join(describe(load_manifest(bundle)))
    assert "draft head: 3 of medusa" in told
    assert "no attention layers" in told
    params = [SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    lookaheads = (2, 3, 8)  # the third head is wrong; there is no fourth
    with opened(bundle) as engine:
        for lookahead, stats in zip(lookaheads, check_text(engine, PROMPTS, params, lookaheads), strict=True):
            assert sum(each.accepted for each in stats) >= 0.6 * sum(each.drafted for each in stats)
            assert all(each.max_tokens / stat.rounds > 2.0 for each, stat in zip(params, stats, strict=True))
            assert max(stat.drafted / stat.rounds for stat in stats) <= min(lookahead, HEADS)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_all_lm_heads_stay_float_where_one_would(quantize: str, tmp_path: Path, target: Any) -> None:
    medusa(tmp_path, target)
    passes = default_passes("float32", quantize=quantize, quantize_lm_head=False)
    model = trace_head(load(tmp_path, target).head).ir_model
    run_passes(model, passes)
    kept = [name for name in model.graph.initializers if "lm_heads" in name]
    assert len(kept) == 3
    assert not any("int" in name for name in kept)
    packed = "int8" if quantize == "int8" else "group4_32_f16_zero"
    assert any(name.endswith(f".blocks.{packed}") for name in model.graph.initializers)


def test_lm_heads_of_all_tokens_are_cut_by_the_token_map(tmp_path: Path, target: Any) -> None:
    medusa_vllm(tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text())
    own = medusa_tensors(4, 1, seed=9)
    write(tmp_path, config, own | {"token_map": torch.tensor(IDS)})
    loaded = load(tmp_path, target)
    assert loaded.ids.tolist() == IDS
    assert torch.equal(loaded.head.lm_heads[2].weight, own["lm_heads.2.weight"][IDS])
    medusa_one_lm_head(tmp_path / "one", target)
    one = load(tmp_path / "one", target).head
    assert len(one.lm_heads) == 1
    assert len(one.blocks) == 2
