"""Unpadded KV and unpadded input are two switches of one loop: all four ways give the same text."""

import itertools

import pytest

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.drafter_kinds import PLANS
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run

MODES = list(itertools.product([True, False], repeat=2))
PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2], [11, 5, 0, 1], [4] * 20]


def decode(plan, unpad_kv, unpad_input, *, params=None):
    target, modes = make_target(context=2), {"unpad_kv": unpad_kv, "unpad_input": unpad_input}
    decoder = make_decoder(target, make_draft("good"), 4, plan=PLANS[plan], max_num_batched_tokens=24, **modes)
    params = params or [SamplingParams(max_tokens=8 + 9 * (i % 4)) for i in range(len(PROMPTS))]
    sequences = [make_sequence(i, p, params[i], seed=i) for i, p in enumerate(PROMPTS)]
    run(decoder, sequences)
    return decoder, sequences, target


@pytest.mark.parametrize("plan", PLANS)
def test_every_mode_gives_the_plain_greedy_text_and_accepts_the_same_drafts(plan):
    """Drafts taken from the wrong logits or a wrong cache would change speed, not text."""
    lengths = []
    for mode in MODES:
        _, sequences, target = decode(plan, *mode)
        check_plain(target, sequences)
        lengths.append([seq.stats.accepted_lengths for seq in sequences])
    assert all(each == lengths[0] for each in lengths)


def test_every_mode_draws_the_same_samples():
    params = [SamplingParams(max_tokens=25, temperature=0.7, top_k=5) for _ in PROMPTS]
    outputs = [[seq.output for seq in decode("chained", *mode, params=params)[1]] for mode in MODES]
    assert all(output == outputs[0] for output in outputs)
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(PROMPTS)


@pytest.mark.parametrize(("unpad_kv", "unpad_input"), MODES)
def test_only_the_padded_modes_feed_and_hold_padding(unpad_kv, unpad_input):
    decoder, _, target = decode("lookup", unpad_kv, unpad_input)
    assert (decoder.padding.input_padding > 0) is not unpad_input
    assert any(shape.kv_span for shape in target.calls) is not unpad_kv
    ragged = [s for s in target.calls if s.num_seqs > 1 and s.num_tokens != s.num_seqs * s.max_new_tokens]
    assert bool(ragged) is unpad_input


def test_the_padding_ratio_does_not_depend_on_the_mode():
    # One prompt length for all, so that every mode has the same rounds.
    ratios = set()
    for unpad_kv, unpad_input in MODES:
        target = make_target(4, context=2)
        decoder = make_decoder(target, None, 0, plan=PLANS["lookup"], unpad_kv=unpad_kv, unpad_input=unpad_input)
        sequences = [make_sequence(i, [i, i], SamplingParams(max_tokens=40)) for i in range(4)]
        run(decoder, sequences)
        lengths = [seq.stats.accepted_lengths for seq in sequences]
        assert decoder.padding.accepted == sum(sum(each[1:]) for each in lengths)
        ratios.add(decoder.padding.ratio)
    assert len(ratios) == 1
    assert ratios.pop() > 0


def test_a_full_row_squeezes_its_padding_out():
    target = FakeExecutor(VOCAB, 4, 48, context=2)  # barely more than the longest text
    moved = []
    move = target.move_entries
    target.move_entries = lambda row, entries: (moved.append(row), move(row, entries))
    decoder = make_decoder(target, None, 0, plan=PLANS["lookup"], unpad_kv=False)
    params = SamplingParams(max_tokens=30)
    sequences = [make_sequence(i, [i, i + 1], params) for i in range(4)]
    run(decoder, sequences)
    assert moved
    check_plain(target, sequences)


def test_prompts_share_steps_with_rounds_only_without_padding():
    for unpad_kv, unpad_input in MODES:
        decoder = make_decoder(make_target(2), None, 0, unpad_kv=unpad_kv, unpad_input=unpad_input)
        first = make_sequence(0, [1, 2], SamplingParams(max_tokens=20))
        decoder.add(first)
        decoder.step()
        decoder.add(make_sequence(1, [3] * 12, SamplingParams(max_tokens=2)))
        before = first.num_generated
        decoder.step()
        mixed = decoder.target.executor.calls[-1].num_tokens == 13
        assert mixed is (unpad_kv and unpad_input)
        assert (first.num_generated > before) is mixed
