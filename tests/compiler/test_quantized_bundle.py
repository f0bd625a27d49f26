"""Quantized bundles end to end: built, checked, recorded, and as lossless as others."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from pairs import TinyPair
from tiny_models import ARCHITECTURES, make_model, save_checkpoint

from specexport.build.check import QUANTIZED_LIMITS, check_engine, check_sequences, unexplained_shares
from specexport.build.pipeline import build_bundle
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckFailedError

PROMPTS = ["abc abc abc abc ab", "the cat sat on the mat, the cat sat on"]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_speculative_text_is_plain_text(kind: str, tmp_path: Path, tiny_pair: TinyPair) -> None:
    folder = tmp_path / "bundle"
    build_bundle(tiny_pair.recipe(folder, quantize=kind, draft_quantize="int8"))
    models = load_manifest(folder).models
    assert {role: entry.quantize for role, entry in models.items()} == {"target": kind, "draft": "int8"}
    assert dict(models["target"].passes)[f"{kind}-quantize"] > 0
    engine = SpecEngine.load(folder, max_num_seqs=2, num_threads=1, spin=False)
    try:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        plain = [engine.generate(prompt, params, speculation=False)[0] for prompt in PROMPTS]
        for drafter in ("draft-model", "lookup"):
            results = engine.generate(PROMPTS, params, drafter=drafter)
            assert sum(result.stats.drafted for result in results) > 0
            assert [list(r.token_ids) for r in results] == [list(r.token_ids) for r in plain]
    finally:
        engine.close()


def test_batched_experts_are_refused_and_nothing_is_left(tmp_path: Path, run_cli: Callable[..., Result]) -> None:
    checkpoint = save_checkpoint(make_model(*ARCHITECTURES["mixtral"]), tmp_path / "mixtral")
    result = run_cli("build", checkpoint, "-o", tmp_path / "out", "--quantize", "int8", "--no-cache")
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: int8 was asked for")
    assert "experts" in error
    assert " Fix: build without --quantize" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mixtral"]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_check_refuses_logits_of_other_positions_and_wrong_scales(
    kind: str, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    folder = tmp_path / "bundle"
    build_bundle(tiny_pair.recipe(folder, quantize=kind, draft=None))
    entry = load_manifest(folder).models["target"]
    from specexport.build import check as engine_check

    sequences = check_sequences(entry.vocab_size)
    # What the engine gives stands for the eager logits: the distance between the two is then what a test adds.
    found = engine_check._run(folder, entry, sequences, unpad_kv=True)
    assert check_engine(folder, entry, sequences, found) < 1e-3
    shifted = [np.roll(logits, 1, axis=0) for logits in found]
    larger = [logits * np.float32(0.4) for logits in found]
    not_a_number = [np.where(logits == logits.max(), np.nan, logits) for logits in found]
    for wrong in (shifted, larger, not_a_number):
        with pytest.raises(CheckFailedError, match=f"{kind} engine is too far from eager transformers"):
            check_engine(folder, entry, sequences, wrong)


def test_the_unexplained_share_tells_mean_logits_and_other_positions() -> None:
    logits = np.random.default_rng(0).normal(size=(40, 500)).astype(np.float32)
    common = logits + np.float32(100)  # a part that every position has must not hide errors
    assert (unexplained_shares(common, common) == 0).all()
    mean = np.broadcast_to(common.mean(axis=0), common.shape)
    np.testing.assert_allclose(unexplained_shares(mean, common), 1, rtol=1e-3)
    others = unexplained_shares(np.roll(common, 1, axis=0), common)
    assert (others > 1.5).all()
    assert max(QUANTIZED_LIMITS.values()) < 1
