"""The whole loop on fake executors: greedy speculation equals plain greedy decoding, whatever the draft."""

import time

import pytest

from specexport_runtime.errors import SpecexportError
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import VOCAB, greedy_reference, make_decoder, make_draft, make_sequence, make_target, run

PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2], [11, 5, 0, 1]]


def test_every_round_adds_one_token_of_the_targets_own():
    sequences = [make_sequence(i, p, SamplingParams(max_tokens=30)) for i, p in enumerate(PROMPTS)]
    events = run(make_decoder(make_target(), make_draft("good"), 4), sequences)
    for seq in sequences:
        assert seq.stats.num_generated_tokens == seq.num_generated == 30
        assert seq.stats.num_generated_tokens == seq.stats.rounds + seq.stats.accepted
        assert sum(seq.stats.accepted_histogram.values()) == seq.stats.draft_rounds
        mine = [event for event in events if event.request is seq]
        assert [t for event in mine for t in event.tokens] == seq.output
        assert sum(event.accepted for event in mine) == seq.stats.accepted


def test_plain_decoding_is_one_token_a_round():
    target = make_target()
    seq = make_sequence(0, [1, 2], SamplingParams(max_tokens=12))
    run(make_decoder(target, None, 0), [seq])
    assert seq.output == greedy_reference(target, [1, 2], 12)
    assert seq.stats.rounds == 12
    assert [shape.num_tokens for shape in target.calls] == [2] + [1] * 11
    assert seq.stats.acceptance_rate is None


def test_a_sequence_stops_at_its_first_end_token_even_inside_an_accepted_draft():
    target = make_target()
    expected = greedy_reference(target, [3], 30)
    ended = make_sequence(2, [3], SamplingParams(max_tokens=30), eos_token_ids=[expected[7]])
    ignored = make_sequence(0, [3], SamplingParams(max_tokens=30, ignore_eos=True), eos_token_ids=[expected[2]])
    stopped = make_sequence(1, [3], SamplingParams(max_tokens=30, stop_token_ids=(expected[4],)))
    run(make_decoder(target, make_draft("same"), 5), [ignored, stopped, ended])
    assert ended.output == expected[: expected.index(expected[7]) + 1]
    assert (ended.finish_reason, ignored.finish_reason) == ("stop", "length")
    assert ignored.output == expected
    assert stopped.output == expected[: expected.index(expected[4]) + 1]


def test_greedy_with_penalties_equals_plain_decoding_with_penalties():
    params = SamplingParams(max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={3: 1.5})
    outputs = []
    for kind, lookahead in ((None, 0), ("good", 4), ("adversarial", 2)):
        seq = make_sequence(0, [4, 4, 1], params)
        run(make_decoder(make_target(), make_draft(kind) if kind else None, lookahead), [seq])
        outputs.append(seq.output)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] != greedy_reference(make_target(), [4, 4, 1], 30)


@pytest.mark.parametrize("size", [9, 3 * VOCAB])
def test_a_draft_of_another_vocabulary_gets_and_proposes_only_what_both_know(size):
    from specexport_runtime.executors.fake import FakeExecutor

    target = make_target()
    decoder = make_decoder(target, FakeExecutor(size, 4, 80, seed=5), 4)
    decoder.draft_model.vocab_size = min(size, VOCAB)
    seq = make_sequence(0, [3, 16], SamplingParams(max_tokens=40))
    run(decoder, [seq])
    assert seq.output == greedy_reference(target, [3, 16], 40)


def test_a_nan_ends_its_own_sequence_and_no_other():
    target = make_target()
    target.logits_after([1, 2])[3] = float("nan")
    sequences = [make_sequence(i, prompt, SamplingParams(max_tokens=9)) for i, prompt in enumerate([[5], [1, 2], [6]])]
    decoder = make_decoder(target, make_draft("good"), 3)
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
    assert [seq.finish_reason for seq in sequences] == ["length", "error", "length"]
    assert sequences[1].error.message == "the target's logits contain NaN."
    for seq in (sequences[0], sequences[2]):
        assert seq.output == greedy_reference(make_target(), seq.tokens[:1], 9)


def test_logits_are_asked_for_only_where_somebody_reads_them():
    """A sampled sequence needs logits from the end of its prompt on; greedy ones and their drafts never do."""
    target, draft = make_target(), make_draft("good")
    wanted = {"target": [], "draft": []}
    for name, executor in (("target", target), ("draft", draft)):
        execute = executor.execute
        executor.execute = lambda want="logits", run=execute, name=name: wanted[name].append(want) or run(want)
    greedy = make_sequence(0, [1, 2], SamplingParams(max_tokens=4))
    run(make_decoder(target, draft, 3), [greedy])
    assert set(wanted["target"] + wanted["draft"]) == {"token_ids"}
    wanted["target"].clear()
    wanted["draft"].clear()
    long = [
        make_sequence(0, [1, 2], SamplingParams(max_tokens=60)),
        make_sequence(1, [7] * 20, SamplingParams(max_tokens=5, temperature=0.9)),
    ]
    decoder = make_decoder(target, draft, 3, max_chunk=8)
    run(decoder, long)
    assert wanted["target"][0] == "token_ids"  # the first part of the long prompt
    assert "logits" in wanted["target"]
    assert wanted["target"][-1] == "token_ids"  # the greedy sequence alone again
    assert set(wanted["draft"]) == {"token_ids", "logits"}


def test_phases_do_not_count_the_same_time_twice():
    decoder = make_decoder(make_target(), make_draft("good"), 4)
    start = time.perf_counter()
    run(decoder, [make_sequence(0, [1, 2, 3] * 15, SamplingParams(max_tokens=3))])
    wall = time.perf_counter() - start
    times = decoder.times
    assert times.prefill > 0
    assert times.verify > 0
    parts = (times.prefill, times.schedule, times.draft, times.pack, times.verify, times.accept)
    assert sum(parts) <= wall


def test_draft_steps_are_those_of_the_longest_draft_and_reading_prompts_is_apart():
    draft = make_draft("same")
    execute = draft.execute

    def takes_a_second(want="logits"):
        before = draft.engine_seconds
        output = execute(want)
        draft.engine_seconds = before + 1.0
        return output

    draft.execute = takes_a_second
    decoder = make_decoder(make_target(), draft, 4)
    run(decoder, [make_sequence(i, p, SamplingParams(max_tokens=n)) for i, (p, n) in enumerate([([1], 6), ([2], 3)])])
    assert decoder.times.draft_steps == len(draft.calls) == 4  # beside it the shorter draft of one token
    assert decoder.times.draft_prefill == 0.0
    run(decoder, [make_sequence(2, [1, 2, 3] * 15, SamplingParams(max_tokens=6))])
    assert decoder.times.draft_steps == 8
    assert decoder.times.draft_prefill == len(draft.calls) - 8 > 0


def test_the_fake_executor_notices_a_lost_rollback():
    decoder = make_decoder(make_target(), make_draft("adversarial"), 4)
    commit = decoder.target.kv.commit
    decoder.target.kv.commit = lambda row, kv_len: commit(row, decoder.target.kv._written[row])
    with pytest.raises(SpecexportError):
        run(decoder, [make_sequence(0, [3], SamplingParams(max_tokens=20))])
