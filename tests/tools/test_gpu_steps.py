import pytest

from specexport_runtime.executors.fake import FakeExecutor
from tests.gpu.test_outputs import compare_texts
from tools.proof.steps import compare_steps, decode, time_step

VOCAB = 61


def test_steps_of_equal_engines_are_equal_and_of_others_not() -> None:
    one, same = FakeExecutor(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120)
    other = FakeExecutor(VOCAB, 4, 120, noise=0.1)
    found = compare_steps(one, same)
    assert [item.max_abs for item in found] == [0.0] * len(found)
    assert all(item.argmax_agreement == 1 and item.passed for item in found)
    noisy = compare_steps(FakeExecutor(VOCAB, 4, 120), other)
    assert all(0 < item.max_abs < 1 for item in noisy)
    assert any(item.argmax_agreement < 1 for item in noisy)


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
    assert time_step(ModelRunner(executor), 2, 5, repeats=4, seconds=10) > 0
    assert len(executor.calls) == 6 + 4
    assert len(set(executor.calls)) == 1
    assert executor.calls[0].num_tokens == executor.calls[0].num_logit_rows == 10
