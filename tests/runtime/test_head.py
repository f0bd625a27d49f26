"""Drafting with a head, on fakes whose features hold the tokens that they are of: a wrong feature is a wrong guess."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.bundle.arrays import CutHead, MaskInput
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.drafters.head_kind import head_obstacle
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.chance import examples
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
from tests.support.loop import VOCAB, make_sequence, make_target, run

NOISES = {"same": 0.0, "good": 0.4, "random": 30.0}


def head_decoder(lookahead, noise=0.0, rows=4, *, lm_head=None, **options):
    return decoder_with(
        lambda runner: HeadDrafter(runner, vocab_size=VOCAB, head=lm_head), lookahead, noise, rows, **options
    )


@pytest.mark.parametrize("lookahead", range(1, 9))
@pytest.mark.parametrize("noise", NOISES)
def test_greedy_text_equals_plain_greedy(noise, lookahead):
    decoder, target, drafter = head_decoder(lookahead, NOISES[noise])
    sequences = make_sequences(lambda i: 5 + 7 * i)
    run(decoder, sequences)
    check_plain(target, sequences)
    drafted, accepted = totals(sequences)
    assert drafted > 50
    assert {"same": accepted == drafted, "good": accepted > drafted / 3, "random": accepted < drafted / 3}[noise]
    drafter.runner.kv.check()
    assert not drafter.runner.kv.num_committed


@examples(40)
@given(
    lookahead=st.integers(1, 8),
    rows=st.integers(1, 4),
    max_chunk=st.integers(1, 10),
    held=st.integers(1, 6),
    lookup=st.booleans(),
)
def test_every_draft_is_made_of_true_features_whatever_the_chunks_and_the_neighbours(
    lookahead, rows, max_chunk, held, lookup
):
    check_true_features(head_decoder, held, lookup=lookup, lookahead=lookahead, rows=rows, max_chunk=max_chunk)


def test_wrong_features_are_seen_in_the_acceptance():
    check_wrong_features(lambda kind: decoder_with(lambda runner: kind(runner, vocab_size=VOCAB), 4))


def test_features_are_asked_for_only_where_a_head_may_draft():
    decoder, target, _ = head_decoder(3)
    wanted = []
    want = target.want_features
    target.want_features = lambda on: (wanted.append(on), want(on))
    plain = make_sequence(0, [1, 2, 3], SamplingParams(max_tokens=6), draft_plan=(DraftStage("lookup", 3),))
    run(decoder, [plain])
    assert True not in wanted
    run(decoder, [make_sequence(1, [1, 2, 3], SamplingParams(max_tokens=6))])
    assert wanted[0] is True
    assert wanted[-1] is False


def test_sampled_text_does_not_depend_on_the_batch():
    check_sampling_alone(lambda: head_decoder(4, 0.4))


def test_a_cut_lm_head_drafts_only_what_it_has():
    ids = np.array([0, 2, 3, 5, 7, 8, 11, 16], np.int32)
    decoder, target, drafter = head_decoder(4, 0.0, lm_head=CutHead(ids, VOCAB))
    after = drafter.runner.executor.logits_after
    drafter.runner.executor.logits_after = lambda tokens, mask=None: after(tokens, mask)[ids]
    sequences = make_sequences(lambda _: 30)
    events = run(decoder, sequences)
    check_plain(target, sequences)
    drafted = [token for event in events for token in event.proposal.tokens]
    assert set(drafted) <= set(ids.tolist())
    assert totals(sequences)[1] > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_parallel_head_drafts_all_tokens_in_one_step(rows, temperature):
    decoder, target, drafter = head_decoder(5, 0.0, rows)
    mask = MaskInput(9, np.full(drafter.runner.executor.feature_size, -1, np.float32))
    parallel = decoder.drafter.drafters["head"] = HeadDrafter(drafter.runner, vocab_size=VOCAB, mask=mask)
    params = SamplingParams(max_tokens=24, temperature=temperature)
    sequences = [make_sequence(i, prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    events = run(decoder, sequences)
    if not temperature:
        check_plain(target, sequences)
        # The first guess sees true features and is right; those behind the mask are a fixed function of it.
        assert all(event.accepted for event in events if event.drafted and len(event.tokens) > 1)
    drafting = [event for event in events if event.drafted]
    assert max(event.drafted for event in drafting) == 5
    assert totals(sequences)[1] >= len(drafting) / 2
    steps = [shape for shape in drafter.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert steps, "several places of a row get logits"
    assert len(drafter.runner.executor.calls) <= len(decoder.target.executor.calls)
    assert not parallel.runner.kv.num_committed


def test_a_cancelled_sequence_leaves_nothing_and_its_neighbours_go_on():
    decoder, target, drafter = head_decoder(4, 0.4, rows=3)
    check_cancelling(decoder, target, drafter, drafter._held)


def test_why_a_head_cannot_draft_is_said():
    target = make_target(gives_features=True)
    assert head_obstacle(ModelRunner(target), has_head=True) is None
    assert "no draft head" in head_obstacle(ModelRunner(target), has_head=False).message
    assert "gives features" in head_obstacle(ModelRunner(make_target()), has_head=True).message
    assert "unpadded" in head_obstacle(ModelRunner(target, unpad_input=False), has_head=True).message
    with pytest.raises(SpecexportError, match="needs the engine of a draft head"):
        HeadDrafter(ModelRunner(target), vocab_size=VOCAB)


@pytest.mark.parametrize("fixed", [24, 40])
def test_no_step_of_a_parallel_head_is_wider_than_its_engine_takes(fixed):
    """Rows that all have much to read, and stand-ins behind it: an engine with fixed sizes takes so many tokens."""
    decoder, target, drafter = head_decoder(5, 0.0, 4)
    executor = drafter.runner.executor
    executor.max_num_tokens = fixed
    mask = MaskInput(9, np.full(executor.feature_size, -1, np.float32))
    parallel = decoder.drafter.drafters["head"] = HeadDrafter(ModelRunner(executor), vocab_size=VOCAB, mask=mask)
    sequences = make_sequences(lambda i: 12 + i, [[3, 4, 5] * 2, [1] * 6, [16] * 6, [7, 0] * 3])
    run(decoder, sequences)
    check_plain(target, sequences)
    assert totals(sequences)[0] > 0
    widest = max(shape.num_tokens for shape in executor.calls)
    assert fixed / 2 < widest <= fixed
    assert not parallel.runner.kv.num_committed
