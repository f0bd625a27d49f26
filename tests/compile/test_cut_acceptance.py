"""The demo pair with half of its draft's vocabulary guesses as well as with all of it, if the right half was kept."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime import engine_load
from specexport_runtime.bundle.arrays import CutHead, load_cut_head
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.engine import SpecEngine
from specexport_runtime.requests.results import GenerationResult
from specexport_runtime.sampling.params import SamplingParams

NUM_PROMPTS, SIZE = 6, 2048
GREEDY = SamplingParams(max_tokens=64)


def acceptance(results: list[GenerationResult]) -> float:
    return sum(each.stats.accepted for each in results) / sum(each.stats.drafted for each in results)


@pytest.mark.whole
def test_the_right_half_of_the_vocabulary_is_enough_and_a_wrong_one_is_not(
    demo_bundle: Path, demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (demo_pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    prompts = [json.loads(line)["prompt"] for line in lines]
    with closing(SpecEngine.load(demo_bundle, num_threads=1)) as engine:
        plain = engine.generate(prompts, GREEDY, drafter="none")
        whole = acceptance(engine.generate(prompts, GREEDY, drafter="draft-model"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": each.text}) + "\n" for each in plain), encoding="utf-8")
    models = {"target": str(demo_pair / "target"), "draft": str(demo_pair / "draft")}
    recipe = BuildRecipe(
        **models,
        output=str(tmp_path / "b"),
        draft_vocab_size=SIZE,
        draft_vocab_texts=str(texts),
        self_draft=True,  # as the demo bundle's target
    )
    result = build_bundle(recipe)
    assert result.reused == ("target",), "only the draft depends on what is counted"
    with closing(SpecEngine.load(result.path, num_threads=1)) as engine:
        cut = engine.generate(prompts, GREEDY, drafter="draft-model")
    assert [each.token_ids for each in cut] == [each.token_ids for each in plain]
    assert acceptance(cut) >= 0.95 * whole

    def shifted(folder: Path, entry: ModelEntry) -> CutHead | None:
        head = load_cut_head(folder, entry)
        return None if head is None else head._replace(ids=np.roll(head.ids, 1))

    monkeypatch.setattr(engine_load, "load_cut_head", shifted)
    with closing(SpecEngine.load(result.path, num_threads=1)) as engine:
        wrong = engine.generate(prompts, GREEDY, drafter="draft-model")
    assert [each.token_ids for each in wrong] == [each.token_ids for each in plain]
    assert acceptance(wrong) < 0.5 * whole
