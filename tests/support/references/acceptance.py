"""How much of what a bundle's drafter guesses is accepted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specexport_runtime import SamplingParams, SpecEngine


def accepted(bundle: Path, prompts: Sequence[Any], drafter: str = "head") -> float:
    """The share of draft tokens that the target accepts, at K = 3; the text is plain decoding's."""
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = [result.token_ids for result in engine.generate(prompts, params, drafter="none")]
    found = engine.generate(prompts, params, drafter=drafter, num_speculative_tokens=3)
    engine.close()
    assert [result.token_ids for result in found] == plain
    return sum(each.stats.accepted for each in found) / sum(each.stats.drafted for each in found)
