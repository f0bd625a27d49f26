"""Models outside transformers' attention interface: slopes as theirs, and texts with drafts as without."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from specexport.trace.outside import alibi_slopes
from specexport_runtime import SamplingParams, SpecEngine
from tests.support.models.tiny_models import ARCHITECTURES, make_model, save_checkpoint


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 71, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    found = np.array(alibi_slopes(num_heads), np.float32)
    np.testing.assert_allclose(found, _get_alibi_slopes(num_heads, torch.device("cpu")).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0].numpy(), rtol=1e-5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bloom in int8, with a GPT-J that drafts."""
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = tmp_path_factory.mktemp("outside")
    target = save_checkpoint(make_model(*ARCHITECTURES["bloom"]), folder / "target")
    draft = save_checkpoint(make_model(*ARCHITECTURES["gptj"]), folder / "draft")
    output = folder / "bundle"
    build_bundle(BuildRecipe(target=str(target), draft=str(draft), output=str(output), quantize="int8"))
    return output


PROMPTS = ["abcabcabcabcabc", "x", "for i in range(10):\n    print(i)\nfor i in range(10):\n"]


@pytest.mark.whole
@pytest.mark.parametrize("drafter", ["draft-model", "lookup"])
def test_texts_with_drafts_are_those_of_plain_decoding(bundle: Path, drafter: str) -> None:
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=False)) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
        plain = engine.generate(PROMPTS, params, drafter="none")
        found = engine.generate(PROMPTS, params, drafter=drafter, num_speculative_tokens=3)
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert [result.logprobs for result in found] == [result.logprobs for result in plain]
        assert sum(result.stats.drafted for result in found) > 0
        engine.check()
