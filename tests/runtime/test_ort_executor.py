"""The ONNX Runtime executor on a real bundle: ragged steps, rollback, rows by pointer, nothing copied."""

import dataclasses

import numpy as np
import onnxruntime
import pytest

from specexport_runtime.abi import StepShape, kv_slack
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import BundleError, IncompatibleError, SpecexportError
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.executors.ort_session import open_session
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.cases import chance
from tests.support.cases.entries import changed
from tests.support.cases.memory import needs_linux, process_bytes

CAPACITY = 96


@pytest.fixture(scope="module")
def bundle(demo_bundle):
    return load_bundle(demo_bundle, max_num_seqs=4)


def make_runner(bundle, rows=4, capacity=CAPACITY, *, unpad_kv=True, unpad_input=True):
    entry = bundle.manifest.models["draft"]
    executor = OrtExecutor(
        bundle.folder / (entry.engine.path if unpad_kv else entry.engine.padded.path), entry, num_rows=rows,
        kv_capacity=capacity, num_threads=1, spin=False, unpad_kv=unpad_kv,
    )  # fmt: skip
    return ModelRunner(executor, unpad_kv=unpad_kv, unpad_input=unpad_input)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(chance.seed(3))
    return [rng.integers(0, 4096, size).tolist() for size in (40, 23, 31, 12)]


def alone(bundle, text) -> np.ndarray:
    """Logits after every token of a text, in one prefill step of a fresh arena."""
    return make_runner(bundle, 1).step(0, [RowWork(text, len(text))]).copy()


MODES = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.fuzz
@pytest.mark.parametrize(("unpad_kv", "unpad_input"), MODES)
def test_ragged_steps_with_rollback_equal_one_prefill(bundle, texts, unpad_kv, unpad_input):
    expected = [alone(bundle, text) for text in texts]
    # Padding takes entries: with 52 a row is full in the middle, and its padding is squeezed out.
    runner = make_runner(bundle, capacity=CAPACITY if unpad_kv else 52, unpad_kv=unpad_kv, unpad_input=unpad_input)
    squeezed = []
    move = runner.executor.move_entries
    runner.executor.move_entries = lambda row, entries: (squeezed.append(row), move(row, entries))
    for row, text in enumerate(texts):
        runner.prefill(row, text[:6])
    rng = np.random.default_rng(chance.seed(0))
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
        for row, item in enumerate(work):
            start, right = runner.logit_starts[row], len(item.tokens) - wrong[row]
            got = logits[start : start + right]
            # Graphs for padding compute rotary angles step by step, where the others have tables.
            atol = 0 if unpad_kv else 2e-4
            np.testing.assert_allclose(got, expected[row][done[row] : done[row] + right], rtol=0, atol=atol)
            done[row] += right
            runner.kv.commit(row, done[row])
            runner.kv.check()
    assert bool(squeezed) is not unpad_kv


@pytest.mark.fuzz
def test_a_moved_row_gives_the_same_logits(bundle, texts):
    runner = make_runner(bundle)
    runner.prefill(3, texts[0][:20])
    runner.prefill(0, texts[1])  # what was in row 0 before must not matter
    runner.release_row(0)
    runner.move_row(3, 0)
    logits = runner.step(0, [RowWork(texts[0][20:25], 5)])
    np.testing.assert_array_equal(logits, alone(bundle, texts[0])[20:25])


def test_a_long_chunk_beside_rows_at_the_end_of_their_capacity(bundle, texts):
    runner = make_runner(bundle, capacity=40)
    for row, past in enumerate((39, 37, 0, 38)):
        if past:
            runner.prefill(row, texts[0][:past])
    full = alone(bundle, texts[0])
    work = [RowWork(texts[0][39:40], 1), RowWork(texts[0][37:40], 3), RowWork(texts[2], 1), IDLE]
    logits = runner.step(0, work)
    np.testing.assert_array_equal(logits[:4], full[[39, 37, 38, 39]])
    np.testing.assert_array_equal(logits[4], alone(bundle, texts[2])[-1])
    runner.kv.commit(0, 40)
    # The idle row wrote an entry that it does not count; its own are as they were.
    np.testing.assert_array_equal(runner.step(3, [RowWork(texts[0][38:40], 2)]), full[38:40])
    with pytest.raises(SpecexportError, match="KV row 0 holds 40 entries"):
        runner.step(0, work)


@needs_linux
@pytest.mark.parametrize("unpad_kv", [True, False])
def test_no_step_touches_entries_that_it_does_not_need(bundle, texts, unpad_kv):
    """Unused entries of the arena are not resident; a copy of a cache anywhere in the engine would make them so."""
    runner = make_runner(bundle, 2, 1 << 17, unpad_kv=unpad_kv)
    assert runner.executor.kv_bytes > 2e8
    chunk = RowWork(texts[0], 1)
    runner.step(0, [chunk, chunk])  # workspaces are there now
    before = process_bytes()
    for work in ([chunk, chunk], [chunk, RowWork([5], 1)], [RowWork([6], 1), IDLE], [RowWork([6], 1)] * 2):
        runner.step(0, work)
    assert process_bytes() - before < runner.executor.kv_bytes / 20


def test_moved_entries_are_packed_to_the_front_and_others_stay(bundle, texts):
    executor = make_runner(bundle, 2, 16).executor
    rng = np.random.default_rng(0)
    for cache in executor._caches.values():
        cache[:] = rng.standard_normal(cache.shape)
    before = {name: cache.copy() for name, cache in executor._caches.items()}
    kept = np.array([0, 1, 4, 5, 9, 15])
    executor.move_entries(1, kept)
    for name, cache in executor._caches.items():
        np.testing.assert_array_equal(cache[1, :, :, :6], before[name][1][:, :, kept])
        np.testing.assert_array_equal(cache[0], before[name][0])
    executor.move_entries(1, np.array([], np.int64))  # a row of padding only


def test_a_bundle_gives_the_graph_that_is_asked_for(bundle):
    for unpad_kv in (True, False):
        inputs = open_executor(bundle, "draft", num_threads=1, spin=False, unpad_kv=unpad_kv)._graph.inputs
        assert ("kv_positions" in inputs) is not unpad_kv
    entry = changed(bundle.manifest.models["draft"], padded=None)
    manifest = dataclasses.replace(bundle.manifest, models={"draft": entry})
    with pytest.raises(IncompatibleError, match="the draft has no padded-KV graph"):
        open_executor(bundle._replace(manifest=manifest), "draft", unpad_kv=False)


def test_a_shape_keeps_its_binding_and_larger_logits_do_not_break_it(bundle, texts):
    executor = make_runner(bundle).executor
    shape = StepShape(0, 1, 1, 1, 1)
    first = executor.prepare(shape)
    assert executor.prepare(shape) is first
    runner = ModelRunner(executor)
    runner.step(0, [RowWork(texts[0][:9], 9)])
    np.testing.assert_array_equal(runner.step(0, [RowWork(texts[0][:1], 1)])[0], alone(bundle, texts[0][:1])[0])


def test_an_engine_that_does_not_match_the_manifest_is_refused(bundle):
    entry = bundle.manifest.models["draft"]
    other = changed(entry, inputs=(*entry.engine.inputs, "surprise"))
    with pytest.raises(IncompatibleError, match="surprise"):
        OrtExecutor(bundle.folder / entry.engine.path, other, num_rows=1, kv_capacity=CAPACITY)


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
    executor = open_executor(small, "target", num_threads=1, spin=False)
    assert executor.kv_capacity == 16 + kv_slack(small.manifest.lookahead)


def test_a_small_draft_runs_on_one_thread_and_the_target_on_those_asked_for(bundle):
    threads = {
        role: open_executor(bundle, role, num_threads=2)._graph.session.get_session_options().intra_op_num_threads
        for role in ("target", "draft")
    }
    assert threads == {"target": 2, "draft": 1}


@pytest.mark.parametrize("unpad_kv", [True, False])
def test_a_graph_of_the_other_kind_is_refused_and_not_run_wrongly(bundle, unpad_kv):
    executor = make_runner(bundle, unpad_kv=unpad_kv).executor
    with pytest.raises(SpecexportError, match="unpad_kv"):
        ModelRunner(executor, unpad_kv=not unpad_kv).step(0, [RowWork([1, 2], 1)])


@pytest.mark.parametrize("capacity", [2**32, 2**60])
def test_an_arena_that_no_machine_has_is_refused(bundle, capacity):
    entry = bundle.manifest.models["draft"]
    told = rf"a KV cache of 4096 rows of {capacity} entries: not enough memory: needs about [\d.]+ GB, [\d.]+ GB may"
    with pytest.raises(IncompatibleError, match=told) as caught:
        OrtExecutor(bundle.folder / entry.engine.path, entry, num_rows=4096, kv_capacity=capacity)
    assert "--max-num-seqs" in caught.value.hint


@pytest.mark.parametrize("limit", [None, 10**6], ids=["no limit", "ulimit -v"])
def test_an_engine_that_memory_is_too_small_for_is_not_called_a_bad_one(bundle, monkeypatch, limit):
    def refuse(*_, **__):
        raise RuntimeError("Exception during initialization: std::bad_alloc")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    if limit:
        monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    left = "0.0" if limit else r"[\d.]+"
    told = rf"model.onnx: not enough memory: needs about [\d.]+ GB, {left} GB may be used\."
    with pytest.raises(IncompatibleError, match=told):
        open_executor(bundle, "target")


def test_onnx_runtime_writes_nothing_beside_the_error(tmp_path, capfd):
    (tmp_path / "model.onnx").write_text("{}")
    with pytest.raises(BundleError, match="cannot load this engine"):
        open_session(tmp_path / "model.onnx", 1, False)
    assert not capfd.readouterr().err
