"""Losslessness of weights or caches of few bits, for every way to draft: greedy at every K, sampled by exact odds."""

from pathlib import Path
from typing import Any

import pytest

from specexport.compile.pipeline import build_bundle
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.requests.layer_choice import LayerRules
from tests.support.references.drafted import Odds, check_text

PROMPTS = ["abc abc abc abc ab", "the cat sat on the mat, the cat sat on", "to be or not to be"]
RULES = LayerRules(threshold=None, period=2, keep_last=None)  # tiny models have two layers
WAYS: dict[str, dict[str, Any]] = {
    "draft-model": {"drafter": "draft-model"},
    "draft-model, exit": {"drafter": "draft-model", "draft_exit": True},
    "self": {"drafter": "self", "layer_rules": RULES},
    "self, exit": {"drafter": "self", "layer_rules": RULES, "draft_exit": True},
    "lookup": {"drafter": "lookup"},
    "chained": {"drafter": "chained"},
}


@pytest.fixture(
    scope="module",
    params=["int8", *(pytest.param(kind, marks=pytest.mark.whole) for kind in ("int4", "none, int8 KV cache"))],
)
def engine(request, tiny_pair, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("quantized") / "bundle"
    kind, cache = request.param.split(",")[0], "int8" if "KV" in request.param else None
    build_bundle(tiny_pair.recipe(folder, quantize=kind, draft_quantize=kind, self_draft=True, kv_cache_dtype=cache))
    loaded = SpecEngine.load(folder, max_num_seqs=8, num_threads=1, spin=False, adaptive=True)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_plain_text_at_every_lookahead(engine: SpecEngine, way: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    stats = check_text(engine, PROMPTS, params, (*range(1, 9), "auto"), **WAYS[way])
    assert sum(each.drafted for some in stats for each in some) > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lookahead", [3, "auto"])
def test_sampled_text_has_the_distribution_of_the_quantized_target(
    engine: SpecEngine, way: str, lookahead: int | str
) -> None:
    odds = Odds(engine, engine.encode(PROMPTS[0]), SamplingParams(temperature=1.0, top_k=6))
    assert odds.fit(engine, num_speculative_tokens=lookahead, **WAYS[way])
    colder = SamplingParams(temperature=0.2, top_k=6)
    assert (way, lookahead) != ("lookup", 3) or not odds.fit(engine, colder, drafter="none"), "the test sees nothing"
