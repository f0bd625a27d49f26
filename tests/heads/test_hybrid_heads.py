"""Draft heads on targets whose layers keep a state: drafts are the equations', and the text is plain decoding's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.models import tiny_dflash, tiny_heads, tiny_modules
from tests.support.models.head_bundles import build, build_module, opened
from tests.support.models.tiny_models import HYBRIDS, calm, make_model, save_checkpoint
from tests.support.references import reference_dflash, reference_head
from tests.support.references.drafted import PROMPTS, check_drafts

pytestmark = pytest.mark.bundle
LFM2 = ("Lfm2", HYBRIDS["lfm2"][1] | {"num_hidden_layers": 6, "layer_types": ["conv", "full_attention"] * 3})
QWEN = (HYBRIDS["qwen3_5"][0], HYBRIDS["qwen3_5"][1] | {"head_dim": 64, "vocab_size": 259})
PAIRS: dict[str, tuple[tuple[str, dict[str, Any]], Any, Any]] = {
    "eagle3": (LFM2, tiny_heads.speculators, reference_head),
    "dflash": (LFM2, tiny_dflash.speculators, reference_dflash),
    "without attention": (HYBRIDS["mamba2"], tiny_heads.eagle, reference_head),
}
"""Name to (the target, the head, and what drafts by its published equations)."""


@pytest.mark.whole
@pytest.mark.parametrize("pair", PAIRS)
def test_a_bundle_drafts_what_the_published_equations_draft(pair: str, tmp_path: Path) -> None:
    """In ragged batches; hidden states between layers that keep a state are those that transformers has there."""
    classes, make_head, reference = PAIRS[pair]
    target = make_model(*classes)
    save_checkpoint(target, tmp_path / "t")
    spec = make_head(tmp_path / "head", target)
    bundle = build(tmp_path / "t", tmp_path, check=False)
    models = load_manifest(bundle).models
    assert models["target"].states
    assert not models["head"].states
    check_drafts(bundle, partial(reference.draft, spec, target))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int8 Qwen3.5, with a module that knows what the last token tells. Of its drafts some are right: what was
    accepted enters states, and what was not does not."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_modules.save_knowing(calm(make_model(*QWEN, seed=5), 0.02), folder / "t", centred=True)
    models = build_module(folder / "t", folder / "b", quantize="int8", max_model_len=192)
    assert models["head"].source.architecture == "mtp head of the target's checkpoint (qwen3_5_text)"
    return folder / "b"


@pytest.mark.whole
@pytest.mark.parametrize(("rows", "options"), [(1, {}), (3, {}), (3, {"max_num_batched_tokens": 8})])
def test_texts_are_those_of_plain_decoding(bundle: Path, rows: int, options: dict[str, Any]) -> None:
    """One by one, in ragged batches, and with prompts in pieces; log-probabilities to the last bit."""
    prompts = [*PROMPTS, [7 + 3 * i for i in range(40)]]
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
    with opened(bundle, rows, **options) as engine:
        plain = engine.generate(prompts, params, drafter="none")
        for drafter, lookahead in (("head", 1), ("head", 3), ("chained", 3)):
            found = engine.generate(prompts, params, drafter=drafter, num_speculative_tokens=lookahead)
            assert [result.token_ids for result in found] == [result.token_ids for result in plain]
            assert [result.logprobs for result in found] == [result.logprobs for result in plain]
            drafted, right = (sum(getattr(each.stats, name) for each in found) for name in ("drafted", "accepted"))
            assert 0.2 < right / drafted < 0.95


@pytest.mark.whole
def test_a_conversation_goes_on_behind_its_states_and_its_features(bundle: Path) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)
    turns: list[tuple[Any, Any]] = []
    with opened(bundle, 2) as engine:
        histories = [list(range(5, 30)), [9, 8, 7] * 8]
        for turn in range(3):
            found = engine.generate(histories, params, drafter="head", num_speculative_tokens=3)
            turns.append((histories, found))
            if turn:
                cached, known = ([each.stats.cached_tokens for each in found], [len(each) - 23 for each in histories])
                assert all(count >= before for count, before in zip(cached, known, strict=True))
            histories = [[*old, *new.token_ids, 40 + turn, 41, 42] for old, new in zip(histories, found, strict=True)]
        for histories, found in turns:
            alone = engine.generate(histories, params, drafter="none", remember=False)
            assert [(each.token_ids, each.logprobs) for each in found] == [
                (each.token_ids, each.logprobs) for each in alone
            ]
