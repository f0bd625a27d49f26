"""The ONNX Runtime executor on a real bundle: ragged steps, rollback, rows by pointer, nothing copied."""

import numpy as np
import pytest

from specexport_runtime.abi import StepShape, kv_slack
from specexport_runtime.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.bundle import load_bundle
from specexport_runtime.errors import IncompatibleError, SpecexportError
from specexport_runtime.executors.ort import OrtExecutor, available_cores
from specexport_runtime.manifest import ModelEntry

CAPACITY = 96


@pytest.fixture(scope="module")
def bundle(demo_bundle):
    return load_bundle(demo_bundle, max_num_seqs=4)


def make_runner(bundle, rows: int = 4, capacity: int = CAPACITY) -> ModelRunner:
    entry = bundle.manifest.models["draft"]
    executor = OrtExecutor(
        bundle.folder / entry.path, entry, num_rows=rows, kv_capacity=capacity, num_threads=1, spin=False
    )
    return ModelRunner(executor)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 4096, size).tolist() for size in (40, 23, 31, 12)]


def alone(bundle, text) -> np.ndarray:
    """Logits after every token of a text, in one prefill step of a fresh arena."""
    return make_runner(bundle, 1).step(0, [RowWork(text, len(text))]).copy()


def test_ragged_steps_with_rollback_equal_one_prefill(bundle, texts):
    expected = [alone(bundle, text) for text in texts]
    runner = make_runner(bundle)
    for row, text in enumerate(texts):
        runner.prefill(row, text[:6])
    rng = np.random.default_rng(0)
    done = [6] * 4
    while any(done[row] < len(texts[row]) for row in range(4)):
        work, wrong = [], []
        for row, text in enumerate(texts):
            right = text[done[row] : done[row] + int(rng.integers(0, 4))]
            junk = rng.integers(0, 4096, int(rng.integers(0, 3))).tolist() if right else []
            work.append(RowWork([*right, *junk], len(right) + len(junk)) if right else IDLE)
            wrong.append(len(junk))
        if all(item is IDLE for item in work):
            continue
        logits = runner.step(0, work)
        start = 0
        for row, item in enumerate(work):
            right = len(item.tokens) - wrong[row]
            got = logits[start : start + right]
            np.testing.assert_allclose(got, expected[row][done[row] : done[row] + right], atol=2e-4)
            start += len(item.tokens)
            done[row] += right
            runner.kv.commit(row, done[row])
            runner.kv.check()


def test_steps_on_some_rows_leave_the_others_alone(bundle, texts):
    runner = make_runner(bundle)
    for row, text in enumerate(texts):
        runner.prefill(row, text[:10])
    runner.step(1, [RowWork([5, 6, 7], 1), RowWork([8], 1)])
    for row in (0, 3):
        logits = runner.step(row, [RowWork(texts[row][10:12], 2)])
        np.testing.assert_allclose(logits, alone(bundle, texts[row])[10:12], atol=2e-4)


def test_a_moved_row_gives_the_same_logits(bundle, texts):
    runner = make_runner(bundle)
    runner.prefill(3, texts[0][:20])
    runner.prefill(0, texts[1])  # what was in row 0 before must not matter
    runner.release_row(0)
    runner.move_row(3, 0)
    logits = runner.step(0, [RowWork(texts[0][20:25], 5)])
    np.testing.assert_allclose(logits, alone(bundle, texts[0])[20:25], atol=2e-4)


def test_what_lies_beyond_kv_len_is_never_read(bundle, texts):
    runner = make_runner(bundle, 2)
    for row in (0, 1):
        runner.prefill(row, texts[0][:15])
    for cache in runner.executor._caches.values():
        cache[1, :, :, 15:] = np.float32(1e9)  # poison the tail of one row
    logits = runner.step(0, [RowWork(texts[0][15:18], 3), RowWork(texts[0][15:18], 3)])
    np.testing.assert_array_equal(logits[:3], logits[3:])


def test_the_arena_is_updated_in_place(bundle, texts):
    runner = make_runner(bundle, 2)
    before = {name: (cache.ctypes.data, cache.copy()) for name, cache in runner.executor._caches.items()}
    runner.step(1, [RowWork(texts[0][:7], 1)])
    for name, cache in runner.executor._caches.items():
        address, old = before[name]
        assert cache.ctypes.data == address
        assert np.array_equal(cache[0], old[0])
        assert (cache[1, :, :, :7] != 0).all()
        assert (cache[1, :, :, 7:] == 0).all()  # a copy would have written the whole row


def test_a_shape_keeps_its_binding_and_larger_logits_do_not_break_it(bundle, texts):
    executor = make_runner(bundle).executor
    shape = StepShape(0, 1, 1, 1, 1)
    first = executor.prepare(shape)
    assert executor.prepare(shape) is first
    runner = ModelRunner(executor)
    runner.step(0, [RowWork(texts[0][:9], 9)])
    np.testing.assert_allclose(runner.step(0, [RowWork(texts[0][:1], 1)])[0], alone(bundle, texts[0][:1])[0], atol=2e-4)


def test_capture_changes_nothing(bundle, texts):
    runner = make_runner(bundle)
    expected = runner.step(0, [RowWork(texts[0][:3], 1)]).copy()
    runner.executor.capture([StepShape(0, 1, 3, 3, 1), StepShape(0, 2, 4, 2, 4)])
    assert np.array_equal(runner.step(0, [RowWork(texts[0][:3], 1)]), expected)


def test_an_engine_that_does_not_match_the_manifest_is_refused(bundle):
    entry = bundle.manifest.models["draft"]
    other = ModelEntry(**{**vars(entry), "inputs": (*entry.inputs, "surprise")})
    with pytest.raises(IncompatibleError, match="surprise"):
        OrtExecutor(bundle.folder / entry.path, other, num_rows=1, kv_capacity=CAPACITY)


def test_misuse_raises(bundle):
    executor = make_runner(bundle).executor
    with pytest.raises(SpecexportError, match="before prepare"):
        executor.execute()
    executor.prepare(StepShape(0, 1, 1, 1, 1))
    executor.close()
    with pytest.raises(SpecexportError, match="before prepare"):
        executor.execute()


def test_capacity_has_room_for_a_whole_verify_step_at_the_end(demo_bundle):
    small = load_bundle(demo_bundle, max_num_seqs=1, max_model_len=16)
    executor = small.make_executor("target", num_threads=1, spin=False)
    assert executor.kv_capacity == 16 + kv_slack(small.manifest.lookahead)


def test_threads_default_to_the_cores_really_available():
    import os

    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_a_small_draft_runs_on_one_thread_and_the_target_on_those_asked_for(bundle):
    threads = {
        role: bundle.make_executor(role, num_threads=2)._session.get_session_options().intra_op_num_threads
        for role in ("target", "draft")
    }
    assert threads == {"target": 2, "draft": 1}
