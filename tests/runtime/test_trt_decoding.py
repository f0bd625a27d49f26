"""The whole loop over TensorRT executors with a fake GPU and engine gives exactly what the fake model gives alone."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.loop import (
    MAX_MODEL_LEN,
    VOCAB,
    greedy_reference,
    make_decoder,
    make_draft,
    make_sequence,
    make_target,
    run,
)
from tests.support.fakes.trt_fakes import PLUGIN, make_entry, open_fake

PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2], [11, 5, 0, 1], [4] * 30, [9, 8]]
LOWERINGS = {"native": {}, "plugin": {"lowering": "plugin", "inputs": PLUGIN}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bundle")


def sequences_for(params, prompts=PROMPTS):
    return [make_sequence(i, prompt, params(i), seed=i) for i, prompt in enumerate(prompts)]


def greedy(i):
    return SamplingParams(max_tokens=8 + 5 * i)


def sampled(i):
    return SamplingParams(max_tokens=8 + 3 * i, temperature=0.9, top_k=9, top_p=0.95)


def mixed(i):
    return greedy(i) if i % 2 else sampled(i)


def decode(executors, params, lookahead, prompts=PROMPTS, **options):
    sequences = sequences_for(params, prompts)
    run(make_decoder(*executors, lookahead, **options), sequences)
    return [(seq.output, seq.stats.drafted, seq.stats.accepted) for seq in sequences]


def open_pair(folder, draft, lookahead=4, rows=4, lowering="native", **options):
    entry = make_entry(lookahead, rows, **LOWERINGS[lowering])
    target, _, engine = open_fake(folder, entry, make_target(rows), **options)
    if draft is None:
        return target, None, engine
    small = make_entry(lookahead, rows, draft=True, **LOWERINGS[lowering])
    return target, open_fake(folder, small, make_draft(draft, rows), **options)[0], engine


def test_with_and_without_graphs_and_captured_ahead_the_output_is_the_same(folder):
    eager, recorded, ahead = open_pair(folder, "good", use_graphs=False), *(open_pair(folder, "good") for _ in range(2))
    for executor in ahead[:2]:
        executor.capture(executor.fixed_shapes())
    expected = decode((make_target(), make_draft("good")), mixed, 4)
    assert all(decode(each[:2], mixed, 4) == expected for each in (eager, recorded, ahead))
    assert eager[2].gpu.calls["launch"] == 0
    assert recorded[2].gpu.calls["launch"] > recorded[2].gpu.calls["enqueue"]


def test_prompts_wait_where_a_verify_step_leaves_them_no_room(folder):
    """Four rows of K+1 = 8 tokens are all that the largest profile takes: prompts are fed in steps of their own."""
    entry = make_entry(7, 4, tokens=32)
    target, _, _engine = open_fake(folder, entry, make_target())
    draft, _, _ = open_fake(folder, make_entry(7, 4, tokens=32, draft=True), make_draft("good"))
    prompts = [[i % VOCAB for i in range(n)] for n in (3, 4, 40, 5, 45, 2, 38)]
    expected = decode((make_target(), make_draft("good")), mixed, 7, prompts)
    assert decode((target, draft), mixed, 7, prompts) == expected


@pytest.mark.parametrize(("lookahead", "tokens"), [(4, 32), (7, 16)])
def test_the_draft_behind_a_prompt_fits_into_the_step_that_ends_it(folder, lookahead, tokens):
    """Copies follow a prompt at once. Alone and beside others, its last token waits where they would not fit."""
    target, _, engine = open_fake(folder, make_entry(lookahead, 4, tokens=tokens), make_target())
    plan = (DraftStage("lookup", lookahead),)
    for prompts in ([[4] * 30], [[4] * n for n in (1, 9, 32, 14, 31, 33, 2, 16, 16, 16, 16, 7)]):
        expected = decode((make_target(), None), mixed, lookahead, prompts, plan=plan)
        assert decode((target, None), mixed, lookahead, prompts, plan=plan) == expected
    assert max(profile.num_tokens for profile in engine.runs if profile.kind == "prefill") == tokens


def test_a_draft_catches_up_in_steps_that_its_engine_takes(folder):
    """After long runs of copied text the draft has tokens to catch up on, in every row at once."""
    small = make_entry(7, 4, tokens=16, draft=True)
    draft, _, engine = open_fake(folder, small, make_draft("good"))
    target, _, _ = open_fake(folder, make_entry(7, 4), make_target())
    plan = (DraftStage("lookup", 7), DraftStage("draft-model", 7))
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5], [6] * 9, [7, 8, 9] * 3, [2, 3] * 5]
    expected = decode((make_target(), make_draft("good")), greedy, 7, prompts, plan=plan)
    assert decode((target, draft), greedy, 7, prompts, plan=plan) == expected
    assert all(profile.num_tokens <= 16 for profile in engine.runs)


def test_rows_at_their_end_do_not_touch_each_other(folder):
    """Every sequence runs to the last token its row holds, while others come and go beside it."""
    target, draft, _engine = open_pair(folder, "good")
    prompts = [[i % VOCAB for i in range(n)] for n in (50, 3, 60, 55, 63, 58, 2)]

    def long(i):
        return SamplingParams(max_tokens=MAX_MODEL_LEN)

    expected = decode((make_target(), make_draft("good")), long, 4, prompts)
    assert decode((target, draft), long, 4, prompts) == expected
    assert max(len(output) + len(prompt) for (output, _, _), prompt in zip(expected, prompts, strict=True)) == 64


def test_fewer_rows_than_the_engine_has(folder):
    """Three rows run in the batch bucket of four: the arena has the fourth, which nobody owns."""
    for rows in (1, 3):
        target, draft, engine = open_pair(folder, "good", num_rows=rows)
        expected = decode((make_target(rows), make_draft("good", rows)), mixed, 4)
        assert decode((target, draft), mixed, 4) == expected
        assert max(profile.num_seqs for profile in engine.runs if profile.is_fixed) == {1: 1, 3: 4}[rows]


def test_sequences_that_leave_make_holes_and_windows_move(folder):
    target, draft, _engine = open_pair(folder, "good", rows=8)
    sequences = sequences_for(greedy, PROMPTS + PROMPTS)
    decoder = make_decoder(target, draft, 4)
    for seq in sequences:
        if seq.index % 3 != 2:  # these never ask the draft model, so its steps begin at other rows
            seq.draft_plan = (DraftStage("lookup", 2),)
        decoder.add(seq)
    windows = Counter()
    for i in range(400):
        if not decoder.has_work:
            break
        decoder.step()
        decoder.check()
        windows.update({key.first_row for key in draft.graphs.keys})
        if i in (6, 9, 15, 20):
            decoder.cancel(decoder.running[0])
    assert not decoder.has_work
    for seq in sequences:
        reference = greedy_reference(make_target(), seq.tokens[: seq.num_prompt_tokens], seq.params.max_tokens)
        assert seq.output == reference[: len(seq.output)]
        assert seq.finish_reason == "cancelled" or len(seq.output) == seq.max_tokens
    assert len(windows) > 2


@examples(15, allow=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_any_workload(folder, data):
    rows = data.draw(st.integers(1, 5))
    lookahead = data.draw(st.integers(1, 5))
    lowering = data.draw(st.sampled_from(sorted(LOWERINGS)))
    kind = data.draw(st.sampled_from([None, "good", "random"]))
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=7))
    limits = data.draw(st.lists(st.integers(1, 24), min_size=len(prompts), max_size=len(prompts)))
    hot = data.draw(st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts)))

    def params(i):
        return SamplingParams(max_tokens=limits[i], temperature=0.8 if hot[i] else 0.0)

    target, draft, engine = open_pair(folder, kind, lookahead, rows, lowering)
    expected = decode((make_target(rows), make_draft(kind, rows) if kind else None), params, lookahead, prompts)
    assert decode((target, draft), params, lookahead, prompts) == expected
    assert {profile.max_new_tokens for profile in engine.runs if profile.kind == "verify"} <= {lookahead + 1}
