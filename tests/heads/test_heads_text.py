"""Whatever drafts, text is the target's: greedy with every lookahead and batch, and sampled, by chi-square."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.verify.sampling import Setting, check_sampling
from specexport_runtime import SamplingParams
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.models import (
    tiny_assistants,
    tiny_corrected,
    tiny_dflash,
    tiny_heads,
    tiny_hydra,
    tiny_modules,
    tiny_turns,
)
from tests.support.models.head_bundles import build, build_module, opened
from tests.support.models.tiny_models import calm, make_llama
from tests.support.references.drafted import PROMPTS, check_text

pytestmark = [pytest.mark.whole, pytest.mark.bundle]
HEADS: dict[str, Callable[[Path, Any], Any]] = {
    "medusa": tiny_heads.medusa_vllm, "hydra": tiny_hydra.hydra_plus, "dflash": tiny_dflash.zlab,
    "dflash2": tiny_corrected.zlab2, "dspark": tiny_corrected.rnn,
}  # fmt: skip


def make_bundle(kind: str, target: Any, target_folder: Path, folder: Path, **options: Any) -> Path:
    if kind in HEADS:
        HEADS[kind](folder / "head", target)
    elif kind == "assistant":
        made = tiny_assistants.make_target(**tiny_assistants.SHARED)
        target_folder = tiny_assistants.save_target(made, folder / "t")
        tiny_assistants.save_assistant(tiny_assistants.make_assistant(), folder / "head")
    else:
        if kind == "mtp":
            model = make_llama(seed=5, num_hidden_layers=tiny_modules.LAYERS, vocab_size=259)
            tiny_modules.save_knowing(calm(model, 0.0), folder / "t")
        else:
            tiny_turns.make("mimo-v2", folder / "t", seed=5, scale=0.02)
        build_module(folder / "t", folder / "b", **options)
        return folder / "b"
    return build(target_folder, folder, **options)


@pytest.mark.parametrize(
    ("kind", "quantize", "draft_quantize"),
    [
        ("medusa", "int8", "int4"), ("hydra", None, None), ("dflash", None, None), ("dflash2", None, None),
        ("dspark", None, None), ("assistant", "int8", "int8"), ("mtp", "int8", "none"), ("mtp-modules", "int8", "int8"),
    ],
)  # fmt: skip
def test_text_stays_the_targets(kind, quantize, draft_quantize, target, target_folder, tmp_path, monkeypatch):
    """In float, the build checks the engines of both too."""
    monkeypatch.setattr("specexport.heads.probe.check_probe", lambda *_: None)  # a random head guesses nothing
    options = {"quantize": quantize, "draft_quantize": draft_quantize, "check": draft_quantize is None}
    bundle = make_bundle(kind, target, target_folder, tmp_path, **options)
    entry = load_manifest(bundle).models["head"]
    assert entry.quantize == (None if draft_quantize == "none" else draft_quantize)
    assert entry.draft_head.guessed is not None or not options["check"]
    prompts = [*PROMPTS, *([7 + i, 30 + i, 200] * (1 + i) for i in range(4))]
    params = [SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True) for i in range(len(prompts))]
    config = {"method": "mtp" if "mtp" in kind else "eagle3", "num_speculative_tokens": 4}  # vLLM's names for heads
    for rows in (1, 8):
        with opened(bundle, rows, speculative_config=config, adaptive=rows > 1) as engine:
            for stats in check_text(engine, prompts, params, range(1, 9)):
                assert sum(each.drafted for each in stats) > 30
            if rows > 1:
                check_text(engine, prompts, params, ["auto"], "auto")
            else:
                hot = [Setting("hot", SamplingParams(temperature=1.0, top_k=8), 3)]
                distribution = check_sampling(
                    engine, PROMPTS, settings=hot, num_samples=2000, num_runs=300, num_contexts=1
                )
                assert distribution.passed, distribution
                assert distribution.has_power


@pytest.mark.parametrize("kind", ["hydra", "assistant", "mtp", "mtp-modules"])
def test_a_head_goes_on_from_a_file(kind, target, target_folder, tmp_path, monkeypatch):
    """The next engine reads neither prompt nor features again, and its drafts are as good."""
    monkeypatch.setattr("specexport.heads.probe.check_probe", lambda *_: None)
    bundle = make_bundle(kind, target, target_folder, tmp_path, check="none", max_model_len=128)
    config = {"method": "mtp" if "mtp" in kind else "eagle3", "num_speculative_tokens": 4}
    params, prompt, found = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1), [7, 30, 200] * 24, []
    for kept in ({"prefix_cache_dir": tmp_path / "kept"},) * 2 + ({"enable_prefix_caching": False},):
        with opened(bundle, 2, speculative_config=config, **kept) as engine:
            found += engine.generate([prompt], params, drafter="head")
    first, again, alone = [(each.token_ids, each.logprobs, each.stats.accepted_lengths) for each in found]
    assert again == first == alone
    assert found[0].stats.cached_tokens == 0
    assert found[1].stats.cached_tokens >= len(prompt) - 8
