import numpy as np
import pytest

from specexport_runtime.executors.fake import FakeExecutor
from tools.gpu_check_lib import graphs, speed
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.forced import decode
from tools.gpu_check_lib.outputs import compare_texts
from tools.gpu_check_lib.rows import Row, judge, read_rows
from tools.gpu_check_lib.steps import compare_logits, compare_steps, time_step

VOCAB = 61


def rows_of(context: Context) -> list[Row]:
    return read_rows(context.recorder.path)


def test_steps_of_equal_engines_are_equal_and_of_others_not() -> None:
    one, same = FakeExecutor(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120)
    other = FakeExecutor(VOCAB, 4, 120, noise=0.1)
    found = compare_steps(one, same)
    assert [item.largest for item in found] == [0.0] * len(found)
    assert all(item.rows == item.same_best for item in found)
    noisy = compare_steps(FakeExecutor(VOCAB, 4, 120), other)
    assert all(0 < item.largest < 1 for item in noisy)
    assert any(item.same_best < item.rows for item in noisy)


def test_logits_that_are_no_numbers_miss_any_target() -> None:
    good = np.ones((2, 5), np.float32)
    bad = good.copy()
    bad[1, 3] = np.nan
    assert judge(compare_logits("x", good, bad).largest, at_most=1e9) == "missed"
    assert judge(compare_logits("x", good, good).largest, at_most=0) == "ok"


def test_gap_where_texts_part_is_the_references_own() -> None:
    reference = FakeExecutor(VOCAB, 1, 100)
    prompt = [3, 1, 4]
    ours = decode(reference, [prompt], 12).outputs[0]
    assert compare_texts(reference, prompt, ours, ours) == (12, 12, None)
    theirs = [*ours[:5], (ours[5] + 7) % VOCAB, *ours[6:]]
    found = compare_texts(reference, prompt, ours, theirs)
    logits = reference.logits_after([*prompt, *ours[:5]])
    assert found.equal == 5
    assert found.gap == pytest.approx(float(logits[ours[5]] - logits[theirs[5]]))
    assert found.gap > 0


def test_a_timed_step_is_the_same_step_each_time() -> None:
    from specexport_runtime.packing.batch import ModelRunner

    executor = FakeExecutor(VOCAB, 2, 100)
    found = time_step(ModelRunner(executor), 2, 5, repeats=4, seconds=10)
    assert len(executor.calls) == 1 + 5 + 4
    assert len(set(executor.calls)) == 1
    assert executor.calls[0].num_tokens == executor.calls[0].num_logit_rows == 10
    assert 0 < found.engine_ms < found.total_ms


# without CUDA graphs


def open_engine(graphs: bool) -> FakeExecutor:
    if graphs:
        raise RuntimeError("this stream cannot be captured")
    return FakeExecutor(61, 4, 300)


def test_a_section_goes_on_without_graphs_and_says_so(context: Context) -> None:
    context.tiny = True
    executor = speed.open_or_eager(context, "x: target", open_engine)
    assert isinstance(executor, FakeExecutor)
    graphs.compare(context, "x", open_engine)
    rows = {row.what: row for row in rows_of(context)}
    assert rows["x: target: CUDA graphs"].verdict == "missed"
    assert "this stream cannot be captured" in rows["x: target: CUDA graphs"].value
    assert rows["x: graphs"].verdict == "failed"
    eager = [row for name, row in rows.items() if name.endswith("eager, for want of graphs")]
    assert len(eager) == 6
    assert "x: step of 1 x 5 tokens, 16 past, eager, for want of graphs" in rows
    assert all(row.data["eager_ms"] > 0 for row in eager)
