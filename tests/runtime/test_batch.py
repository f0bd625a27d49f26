"""Packing: the flat arrays of a step say exactly what the per-row work said."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.abi import STEP_INPUTS
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import StepBuffers
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.logit_rows import NO_TOKEN
from specexport_runtime.packing.batch import ModelRunner, RowWork, fill_index_inputs, step_shape


@st.composite
def works(draw):
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
    logits = [draw(st.integers(1 if count else 0, count)) for count in counts]
    return [RowWork(tuple(range(10 * b, 10 * b + n)), m) for b, (n, m) in enumerate(zip(counts, logits, strict=True))]


@given(works(), st.integers(0, 3))
def test_index_inputs_describe_the_work(work, first_row):
    shape = step_shape(first_row, work)
    counts = [len(row.tokens) for row in work]
    assert shape == (first_row, len(work), sum(counts), max(counts), sum(row.num_logits for row in work), 0, 1)
    buffers = StepBuffers(*(np.full(shape.shape_of(spec), -99, spec.dtype) for spec in STEP_INPUTS))
    fill_index_inputs(buffers, counts, [row.num_logits for row in work])
    assert buffers.cu_new_tokens.tolist() == [sum(counts[:b]) for b in range(len(work) + 1)]
    flat = [token for row in work for token in row.tokens]
    tile = np.asarray(flat)[buffers.pad_index]  # also checks that padding names valid tokens
    for b, row in enumerate(work):
        assert tuple(tile[b, 0, : counts[b]]) == row.tokens
    assert tile.reshape(-1)[buffers.unpad_index].tolist() == flat
    for b, count in enumerate(counts):
        start, end = int(buffers.row_starts[b, 0]), int(buffers.row_ends[b, 0])
        assert end - start == max(count, 1)
        assert 0 <= start < end <= len(flat)
        assert not count or flat[start:end] == list(work[b].tokens)
    wanted = [token for row in work for token in row.tokens[len(row.tokens) - row.num_logits :]]
    assert np.asarray(flat)[buffers.logit_rows].tolist() == wanted


def test_a_step_may_be_longer_than_any_row():
    """Four rows of 20 entries take prompts of 18 tokens each: 72 positions in one step."""
    executor = FakeExecutor(70, 4, 20)
    runner = ModelRunner(executor)
    texts = [[(7 * row + j) % 70 for j in range(18)] for row in range(4)]
    logits = runner.step(0, [RowWork(text, 1) for text in texts])
    np.testing.assert_array_equal(logits, [executor.logits_after(text) for text in texts])


@pytest.mark.parametrize("limit", [None, 5])
def test_chunks_are_no_larger_than_a_step_of_the_executor(limit):
    executor = FakeExecutor(70, 1, 40)
    executor.max_num_tokens = limit
    ModelRunner(executor).prefill(0, list(range(30)))
    assert [shape.num_tokens for shape in executor.calls] == ([5] * 6 if limit else [30])


def test_token_ids_are_the_argmax_of_the_same_step():
    executor = FakeExecutor(70, 2, 20)
    runner = ModelRunner(executor)
    work = [RowWork([1, 2, 3], 3), RowWork([4], 1)]
    logits = runner.step(0, work)
    ids = runner.step(0, work, "token_ids")
    assert ids.dtype == np.int64
    assert ids.tolist() == logits.argmax(axis=1).tolist()
    executor.logits_after([1, 2])[5] = np.nan
    assert runner.step(0, work, "token_ids").tolist() == [ids[0], NO_TOKEN, ids[2], ids[3]]


@given(st.lists(works(), min_size=1, max_size=4))
def test_steps_with_commits_between_equal_the_model_on_the_whole_text(steps):
    executor = FakeExecutor(70, 6, 64)
    runner = ModelRunner(executor)
    texts = [[] for _ in range(6)]
    for work in steps:
        logits = runner.step(0, work)
        row = 0
        for b, item in enumerate(work):
            count = len(item.tokens)
            for j in range(count - item.num_logits, count):
                assert np.array_equal(logits[row], executor.logits_after([*texts[b], *item.tokens[: j + 1]]))
                row += 1
            kept = count - count // 2  # the second half is "rejected"
            runner.kv.commit(b, runner.kv.kv_len(b) + kept)
            texts[b] += item.tokens[:kept]
        assert row == len(logits)


def test_a_row_without_room_raises_before_anything_runs():
    executor = FakeExecutor(70, 2, 10)
    runner = ModelRunner(executor)
    runner.prefill(0, list(range(9)))
    calls = len(executor.calls)
    with pytest.raises(SpecexportError, match="KV row 0"):
        runner.step(0, [RowWork([1, 2], 1), RowWork([1], 1)])
    assert len(executor.calls) == calls
    # A full row shares a step with a long chunk.
    logits = runner.step(0, [RowWork([1], 1), RowWork(list(range(8)), 1)])
    assert np.array_equal(logits, [executor.logits_after([*range(9), 1]), executor.logits_after(list(range(8)))])


@given(works())
def test_padded_input_gives_the_same_logits_in_wider_rows(work):
    plain, padded = ModelRunner(FakeExecutor(70, 6, 64)), ModelRunner(FakeExecutor(70, 6, 64), unpad_input=False)
    expected, got = plain.step(0, work), padded.step(0, work)
    for b, row in enumerate(work):
        ours = expected[plain.logit_starts[b] : plain.logit_starts[b] + row.num_logits]
        assert np.array_equal(ours, got[padded.logit_starts[b] : padded.logit_starts[b] + row.num_logits])
    width = max(len(row.tokens) for row in work)
    if len(work) > 1:
        assert padded.executor.calls[-1].num_tokens == width * len(work)
        assert padded.step_padding == width * len(work) - sum(len(row.tokens) for row in work)
    assert plain.step_padding == 0
