"""Drafting with a head that fills blocks (DFlash), on fakes whose guesses need the whole context, true and in order."""

from pathlib import Path

import pytest

from specexport_runtime.bundle.arrays import load_mask
from specexport_runtime.errors import BundleError
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.entries import changed, make_entry
from tests.support.fakes.drafter_kinds import block_decoder
from tests.support.fakes.heads_on_fakes import (
    PROMPTS,
)
from tests.support.fakes.loop import VOCAB, make_sequence, run


def test_one_step_of_the_head_a_round():
    decoder, target, drafter = block_decoder(5, 0.0)
    sequences = [make_sequence(i, prompt, SamplingParams(max_tokens=24)) for i, prompt in enumerate(PROMPTS[:4])]
    run(decoder, sequences)
    assert len(drafter.runner.executor.calls) <= len(target.calls)
    wide = [shape for shape in drafter.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert wide, "several places of a row get logits"
    assert all(shape.num_tokens >= shape.num_logit_rows + 2 for shape in wide), "context, the newest token, and masks"


def test_what_a_manifest_says_of_a_block():
    entry = make_entry(vocab_size=VOCAB, feature_size=6, kind="dflash", mask_token_id=4, block_size=8)
    found = load_mask(Path("b"), entry)
    assert (found.token, found.block_size, found.most, found.feature.tolist()) == (4, 8, 7, [0.0] * 6)
    assert load_mask(Path("b"), changed(entry, mask_token_id=None)) is None
    with pytest.raises(BundleError, match="stands for unknown ones without a feature"):
        load_mask(Path("b"), changed(entry, block_size=None))
    with pytest.raises(BundleError, match="stands for unknown ones"):
        load_mask(Path("b"), changed(entry, mask_token_id=entry.vocab_size))
