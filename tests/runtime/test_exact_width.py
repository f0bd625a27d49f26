"""Drafts stay on the side of the border where plain decoding has each token."""

from dataclasses import replace
from pathlib import Path

import pytest

from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.executors.exact_width import room_within, sum_border
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.sequence import Sequence

BORDER = 64


def entries_seen_plainly(position: int, prompt: int) -> int:
    """Entries that plain decoding's step sees when it reads the token at ``position``: itself twice, or the prompt."""
    return prompt if position < prompt else position + 2


@pytest.mark.parametrize("prompt", range(1, 70))
def test_every_token_stays_on_its_side_of_the_border(prompt: int) -> None:
    for length in range(prompt, 72):
        reads_prompt = length == prompt
        first = 0 if reads_prompt else length - 1
        most = room_within(BORDER, length, reads_prompt=reads_prompt)
        for drafts in range(9):
            # What the step sees; one token of its own runs twice.
            seen = length + drafts + (not reads_prompt and not drafts)
            sides = {(entries_seen_plainly(at, prompt) <= BORDER) == (seen <= BORDER) for at in range(first, seen)}
            exact = drafts == 0 or sides == {True}
            assert exact == (most is None or drafts <= most), (length, drafts)


def test_only_quantized_models_with_long_heads_have_a_border(demo_bundle: Path) -> None:
    entry = load_manifest(demo_bundle).models["target"]
    long_heads = (LayerGeometry(1, 256, 256),)
    assert sum_border(replace(entry, quantize="int8", layers=long_heads)) == BORDER
    assert sum_border(replace(entry, quantize="int8")) == 0
    assert sum_border(replace(entry, quantize="int8", layers=long_heads, kv_dtype="int8")) == 0
    assert sum_border(replace(entry, layers=long_heads)) == 0


def test_the_decoder_keeps_drafts_within_the_border() -> None:
    target = FakeExecutor(vocab_size=12, num_rows=1, kv_capacity=100)
    target.sum_border = BORDER  # type: ignore[attr-defined]
    decoder = Decoder(ModelRunner(target), ChainDrafter())
    seq = Sequence(0, [1] * 60, SamplingParams(max_tokens=30), vocab_size=12, max_model_len=95)
    assert decoder._room(seq) == 3
    seq.commit([1])
    assert decoder._room(seq) == 2
    seq.commit([1, 1])
    assert decoder._room(seq) == 0
    seq.commit([1])
    assert decoder._room(seq) == seq.room_for_drafts > 8
