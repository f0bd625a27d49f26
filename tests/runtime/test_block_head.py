"""Drafting with a head that fills blocks (DFlash), on fakes whose guesses need the whole context, true and in order."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.bundle.arrays import MaskInput, load_mask
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.errors import BundleError
from specexport_runtime.sampling.params import SamplingParams
from tests.support.chance import examples
from tests.support.entries import changed, make_entry
from tests.support.heads_on_fakes import (
    PROMPTS,
    check_cancelling,
    check_plain,
    check_sampling_alone,
    check_true_features,
    check_wrong_features,
    decoder_with,
    make_sequences,
    totals,
)
from tests.support.loop import VOCAB, make_sequence, run

MASK = 9


def block_decoder(lookahead, noise=0.0, rows=4, *, block_size=8, kind=HeadDrafter, **options):
    def make(runner):
        mask = MaskInput(MASK, np.zeros(runner.executor.feature_size, np.float32), block_size)
        return kind(runner, vocab_size=VOCAB, mask=mask)

    return decoder_with(make, lookahead, noise, rows, fake={"fills_blocks": True}, **options)


@pytest.mark.parametrize("lookahead", [1, 2, 5, 8])
@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.4, 0.2), (30.0, 0.0)])
def test_greedy_text_equals_plain_greedy(noise, least, lookahead):
    decoder, target, drafter = block_decoder(lookahead, noise)
    sequences = make_sequences(lambda i: 5 + 7 * i)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    drafted, accepted = totals(sequences)
    assert drafted >= accepted >= least * drafted
    assert max(event.drafted for event in events) == min(lookahead, 7)
    assert drafter.traits.max_lookahead == 7
    assert not drafter.runner.kv.num_committed


@examples(40)
@given(
    lookahead=st.integers(1, 8),
    rows=st.integers(1, 4),
    max_chunk=st.integers(1, 10),
    held=st.integers(1, 6),
    block_size=st.integers(2, 9),
    lookup=st.booleans(),
)
def test_every_draft_reads_the_whole_context_whatever_the_chunks_and_the_neighbours(
    lookahead, rows, max_chunk, held, block_size, lookup
):
    sizes = {"lookahead": lookahead, "rows": rows, "max_chunk": max_chunk, "block_size": block_size}
    check_true_features(block_decoder, held, lookup=lookup, **sizes)


def test_wrong_context_is_seen_in_the_acceptance():
    check_wrong_features(lambda kind: block_decoder(4, 0.0, kind=kind))


def test_one_step_of_the_head_a_round():
    decoder, target, drafter = block_decoder(5, 0.0)
    sequences = [make_sequence(i, prompt, SamplingParams(max_tokens=24)) for i, prompt in enumerate(PROMPTS[:4])]
    run(decoder, sequences)
    assert len(drafter.runner.executor.calls) <= len(target.calls)
    wide = [shape for shape in drafter.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert wide, "several places of a row get logits"
    assert all(shape.num_tokens >= shape.num_logit_rows + 2 for shape in wide), "context, the newest token, and masks"


def test_sampled_text_does_not_depend_on_the_batch():
    check_sampling_alone(lambda: block_decoder(4, 0.4))


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    decoder, target, drafter = block_decoder(4, 0.4, rows=3)
    check_cancelling(decoder, target, drafter, drafter._held)


def test_what_a_manifest_says_of_a_block():
    entry = make_entry(vocab_size=VOCAB, feature_size=6, kind="dflash", mask_token_id=4, block_size=8)
    found = load_mask(Path("b"), entry)
    assert (found.token, found.block_size, found.most, found.feature.tolist()) == (4, 8, 7, [0.0] * 6)
    assert load_mask(Path("b"), changed(entry, mask_token_id=None)) is None
    with pytest.raises(BundleError, match="stands for unknown ones without a feature"):
        load_mask(Path("b"), changed(entry, block_size=None))
    with pytest.raises(BundleError, match="stands for unknown ones"):
        load_mask(Path("b"), changed(entry, mask_token_id=entry.vocab_size))
