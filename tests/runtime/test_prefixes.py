"""Prefix reuse: what a row has is not read again, and nothing else changes: texts, drafts, whose text it is."""

import gc

import numpy as np
import pytest

from specexport_runtime.decoding.prefixes import MIN_REUSED
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage, Proposal
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes import heads_on_fakes, loop
from tests.support.fakes.fed import ask, check_conversation, fed
from tests.support.fakes.requests import request_of

LONG = (np.arange(30) * 7 % loop.VOCAB).tolist()
OTHER = (np.arange(30) * 5 % loop.VOCAB).tolist()
MODEL = (DraftStage("draft-model", 4),)


def decoder_of(rows=4, *, draft="good", most=None, reuse=True, **options):
    executor = loop.make_draft(draft, rows) if draft else None
    return loop.make_decoder(
        loop.make_target(rows, context=3), executor, 4, reuses_prefixes=reuse, max_num_seqs=most, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft", ["good", "same", None])
def test_a_conversation_reads_only_what_is_new(draft, temperature):
    check_conversation(lambda reuse: decoder_of(2, draft=draft, reuse=reuse), LONG[:20], temperature)


@pytest.mark.parametrize("rows", [2, 3])
def test_two_conversations_keep_their_rows(rows):
    """One sequence at a time, in the first row: what another left there takes the place of what is wanted."""
    decoder, prompts = decoder_of(rows), {"a": LONG, "b": OTHER}
    for turn in range(4):
        for name, prompt in prompts.items():
            seq = ask(decoder, prompt)
            assert seq.output == loop.greedy_reference(decoder.target.executor, prompt, 6)
            assert bool(seq.stats.cached_tokens) == (turn > 0)
            prompts[name] = [*seq.tokens, 2, 2]
    assert len(decoder.slots.kept) == 2
    assert decoder.slots.counts.copied > 0


def test_a_row_that_runs_is_copied_from():
    decoder = decoder_of()
    running = loop.make_sequence(0, LONG, SamplingParams(max_tokens=30), scope="")
    decoder.add(running)
    decoder.step()
    decoder.step()
    late = loop.make_sequence(1, [*LONG[:25], 1, 1], SamplingParams(max_tokens=6), scope="")
    loop.run(decoder, [late])
    assert late.stats.cached_tokens == 25
    heads_on_fakes.check_plain(decoder.target.executor, [running, late])


def test_prompts_that_come_together_are_read_once():
    """The second waits until the first has read what both begin with; one that begins otherwise does not."""
    prompt = (np.arange(70) * 3 % loop.VOCAB).tolist()
    target = FakeExecutor(loop.VOCAB, 4, 120, context=3)
    decoder = loop.make_decoder(target, None, 0, reuses_prefixes=True, max_num_batched_tokens=80)
    counts = fed(decoder)
    sequences = [
        request_of(i, ids, SamplingParams(max_tokens=4), vocab_size=loop.VOCAB, max_model_len=100, scope="")
        for i, ids in enumerate([prompt, prompt, [*prompt[:68], 5, 5], OTHER])
    ]
    loop.run(decoder, sequences)
    assert [seq.stats.cached_tokens for seq in sequences] == [0, 69, 68, 0]
    assert sum(counts) == 70 + 1 + 2 + 30 + 4 * 3
    heads_on_fakes.check_plain(target, sequences)


def test_what_says_least_is_forgotten_first():
    """A text that another begins with, then what nobody used for the longest time; never what is pinned."""
    decoder = decoder_of(3, draft=None, most=1)
    ask(decoder, LONG, pinned=True)
    ask(decoder, OTHER)
    ask(decoder, OTHER + [1] * 20)  # continues the one before, in its row
    assert len(decoder.slots.kept) == 2
    third = (np.arange(30) * 11 % loop.VOCAB).tolist()
    ask(decoder, third)
    assert len(decoder.slots.kept) == 3
    fourth = (np.arange(30) * 13 % loop.VOCAB).tolist()
    ask(decoder, fourth)  # the oldest that is not pinned goes
    assert [ask(decoder, prompt).stats.cached_tokens > 0 for prompt in (OTHER, fourth, LONG)] == [False, True, True]
    for prompt in (third, OTHER, third, OTHER, fourth):
        ask(decoder, prompt)
    assert ask(decoder, LONG).stats.cached_tokens == len(LONG) - 1
    assert len(decoder.slots.kept.pinned_rows) == 1
    assert decoder.slots.kept.unpin(LONG, "")
    assert not decoder.slots.kept.unpin(LONG, "")
    assert not decoder.slots.kept.pinned_rows


def test_scopes_see_nothing_of_each_other():
    decoder = decoder_of()
    found = [ask(decoder, LONG, scope=scope).stats.cached_tokens for scope in ("a", "b", None, "a", None, "b")]
    assert found == [0, 0, None, len(LONG) - 1, None, len(LONG) - 1]


def test_short_texts_are_not_kept():
    decoder = decoder_of()
    ask(decoder, LONG[: MIN_REUSED - 4], 3)
    assert len(decoder.slots.kept) == 0
    ask(decoder, LONG[:MIN_REUSED], 3)
    assert len(decoder.slots.kept) == 1
    assert ask(decoder, [*LONG[: MIN_REUSED - 1], 16, 16]).stats.cached_tokens == 0


def test_a_cancelled_sequence_leaves_what_was_read():
    decoder = decoder_of(max_num_batched_tokens=20)
    seq = loop.make_sequence(0, LONG, SamplingParams(max_tokens=9), scope="")
    decoder.add(seq)
    decoder.step()
    decoder.cancel(seq)
    assert ask(decoder, LONG).stats.cached_tokens == 20
    assert ask(decoder, LONG).output == loop.greedy_reference(decoder.target.executor, LONG, 6)


def test_an_engine_that_fails_leaves_nothing():
    decoder = decoder_of()
    ask(decoder, LONG)
    loop.fail_at(decoder.target.executor, 1)
    seq = loop.make_sequence(0, OTHER, SamplingParams(max_tokens=9), scope="")
    decoder.add(seq)
    with pytest.raises(RuntimeError) as failed:
        decoder.step()
    decoder.fail(failed.value)
    assert len(decoder.slots.kept) == 0
    assert ask(decoder, LONG).stats.cached_tokens == 0


@pytest.mark.parametrize(("noise", "temperature"), [(0.0, 0.0), (0.4, 0.9)])
def test_a_head_goes_on_from_its_row(noise, temperature):
    """With every draft as it is without reuse: of a head without noise all are right, so its features are true."""
    texts = {}
    for reuse in (True, False):

        def make(runner):
            return HeadDrafter(runner, vocab_size=loop.VOCAB)

        decoder, _, drafter = heads_on_fakes.decoder_with(make, 4, noise, 2, reuses_prefixes=reuse)
        texts[reuse], prompt = [], LONG[:20]
        for turn in range(4):
            seq = ask(decoder, prompt, 7, seed=turn, temperature=temperature)
            texts[reuse].append((seq.output, seq.stats.accepted_lengths))
            if reuse and turn:
                assert seq.stats.cached_tokens >= len(prompt) - 6
            if not noise and not temperature:
                assert seq.stats.accepted == seq.stats.drafted > 0
            # The next turn goes on, begins otherwise in the middle of an answer, or repeats the prompt.
            prompt = [[*seq.tokens, 3, 1], [*seq.tokens[:-2], 0, 5], prompt, [*prompt, 9]][turn]
    assert texts[True] == texts[False]
    del seq
    gc.collect()
    assert not drafter._held


def test_a_head_reads_what_it_has_no_features_of():
    """A text of a sequence that it did not draft for."""
    decoder, target, _ = heads_on_fakes.decoder_with(
        lambda runner: HeadDrafter(runner, vocab_size=loop.VOCAB), 4, reuses_prefixes=True
    )
    plain = ask(decoder, LONG, plan=(DraftStage("lookup", 1),))
    assert ask(decoder, plain.tokens, 4).stats.cached_tokens == 0
    drafted = ask(decoder, plain.tokens, 4)
    assert drafted.stats.cached_tokens == len(plain.tokens) - 2
    assert drafted.output == loop.greedy_reference(target, plain.tokens, 4)
    assert drafted.stats.accepted == drafted.stats.drafted > 0


def test_a_drafter_of_the_users_own_begins_anew():
    """One that knows nothing of prefixes is told that the row is done, as ever."""
    told = []

    class Own(Drafter):
        traits = loop.make_decoder(loop.make_target(), None, 0).drafter.drafters["lookup"].traits

        def propose(self, sequences, lookaheads):
            return [Proposal([]) for _ in sequences]

        def move_row(self, source, destination):
            told.append("move")

        def release_row(self, row):
            told.append(row)

    decoder = decoder_of(draft=None)
    decoder.drafter.drafters["own"] = Own()
    ask(decoder, LONG, plan=(DraftStage("own", 3),))
    assert told == [0]
    assert ask(decoder, LONG, plan=(DraftStage("own", 3),)).stats.cached_tokens == len(LONG) - 1


def test_rows_are_taken_over_whole_or_not_at_all():
    runner = ModelRunner(loop.make_target())
    runner.kv.restore(0, 5)
    assert runner.kv.kv_len(0) == 5
    with pytest.raises(SpecexportError, match="cannot take over 3 entries, it has 5"):
        runner.kv.restore(0, 3)
    with pytest.raises(SpecexportError, match="cannot take over"):
        runner.kv.restore(1, loop.CAPACITY + 1)
