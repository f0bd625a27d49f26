"""The TensorRT executor on a fake GPU: profiles, windows, graphs, copies, and what is refused."""

import logging
from pathlib import Path

import numpy as np
import pytest

from specexport_runtime.abi import LayerGeometry, StepShape
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import IncompatibleError, SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.trt import TrtExecutor
from specexport_runtime.executors.trt_graphs import GraphKey
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.fakes.trt_fakes import LAYERS, NATIVE, PLUGIN, FakeGpu, make_entry, open_fake

VOCAB, ROWS, LOOKAHEAD, MAX_LEN = 17, 4, 4, 64
CAPACITY = MAX_LEN + LOOKAHEAD + 1
DECODE, VERIFY = 0, 3
"""Numbers of the one-row decode and verify profiles; those of 2 and 4 rows follow."""


@pytest.fixture(params=["native", "plugin"])
def entry(request):
    plugin = {"lowering": "plugin", "inputs": PLUGIN} if request.param == "plugin" else {}
    return make_entry(LOOKAHEAD, ROWS, MAX_LEN, **plugin)


def open_one(folder, entry=None, gpu=None, **options):
    return open_fake(folder, entry or make_entry(LOOKAHEAD, ROWS, MAX_LEN), FakeExecutor(VOCAB, 1, 1), gpu, **options)


class Pair:
    """A TensorRT executor and the fake model, stepped side by side; every output must agree."""

    def __init__(self, executor):
        self.executor = executor
        self.runners = [
            ModelRunner(executor),
            ModelRunner(FakeExecutor(VOCAB, executor.num_rows, executor.kv_capacity)),
        ]
        self.tokens = [[] for _ in range(executor.num_rows)]

    def step(self, first_row, counts, *, commit=True, all_logits=True, want="logits"):
        rng = np.random.default_rng([first_row, *counts, len(self.tokens[first_row])])
        work = []
        for count in counts:
            tokens = rng.integers(0, VOCAB, count).tolist()
            work.append(RowWork(tokens, min(count, 5) if all_logits else 1) if count else IDLE)
        got, expected = (runner.step(first_row, work, want).copy() for runner in self.runners)
        np.testing.assert_array_equal(got, expected)
        for row, item in enumerate(work, start=first_row):
            if commit and item.tokens:
                self.tokens[row] += item.tokens
                for runner in self.runners:
                    runner.kv.commit(row, len(self.tokens[row]))
        return got

    def move(self, source, destination):
        for runner in self.runners:
            runner.move_row(source, destination)
        self.tokens[destination], self.tokens[source] = self.tokens[source], []


@pytest.mark.parametrize("want", ["logits", "token_ids"])
@pytest.mark.parametrize(
    ("first_row", "counts"),
    [
        (0, [1]),
        (3, [1]),  # at the arena's end
        (0, [5, 1, 2, 5]),  # ragged verification
        (1, [5, 3]),
        (1, [2, 1, 4]),  # three rows in a bucket of four: the window begins a row earlier
        (2, [5, 5]),
        (1, [3, 0, 5]),  # a hole
        (0, [0, 2, 0, 1]),
        (0, [20]),
        (0, [9, 5, 1, 22]),  # a prompt beside verification
        (2, [17, 2]),
        (0, [0, 26, 0, 3]),
    ],
)
def test_every_kind_of_step(tmp_path, entry, first_row, counts, want):
    executor, gpu, _ = open_one(tmp_path, entry)
    pair = Pair(executor)
    pair.step(0, [7, 3, 9, 5])
    for graphs in (True, False):  # the second time round runs the recorded step
        before = gpu.calls["launch"]
        pair.step(first_row, counts, want=want, commit=False)
        pair.step(first_row, counts, want=want)
        pair.step(0, [1, 1, 1, 1])  # what the step left in the cache
        pair.step(0, [2, 5, 1, 3])
        assert gpu.calls["launch"] > before or graphs


def test_a_step_is_one_copy_in_one_launch_one_copy_out_one_wait(tmp_path, entry):
    executor, gpu, _ = open_one(tmp_path, entry)
    pair = Pair(executor)
    for counts in ([5, 5], [9, 12], [1, 1]):
        pair.step(0, counts)
        pair.step(0, counts, commit=False)
        gpu.log.clear()
        pair.step(0, counts, want="token_ids")
        run = "launch" if max(counts) <= 5 else "enqueue"
        assert gpu.log == ["copy_in", run, "copy_out", "synchronize"]


def test_only_what_is_new_goes_in_and_only_what_is_wanted_comes_back(tmp_path):
    executor, gpu, _ = open_one(tmp_path)
    with pytest.raises(SpecexportError, match="before prepare"):
        executor.execute()
    pair = Pair(executor)
    pair.step(0, [5, 2], want="token_ids")
    assert gpu.copied[-1] == 8 * 7
    pair.step(0, [5, 2], want="logits")
    assert gpu.copied[-1] == 4 * VOCAB * 7
    pair.step(0, [12])
    small = gpu.copied[-2]
    pair.step(0, [40])
    assert gpu.copied[-2] > small, "tensors of a ranged step are as small as the step"


def test_the_first_step_of_a_window_is_recorded_and_later_ones_replay_it(tmp_path):
    executor, gpu, _ = open_one(tmp_path)
    pair = Pair(executor)
    pair.step(0, [1])
    assert executor.graphs.keys == [GraphKey(DECODE, 0)]
    for i in range(5):
        pair.step(0, [1])
        assert executor.graphs.replays == i + 1
    assert gpu.log.index("begin_capture") > gpu.log.index("synchronize"), "the first result does not wait"
    pair.step(2, [1])
    pair.step(1, [4, 3])  # rows 1 and 2
    pair.step(2, [4, 3])  # rows 2 and 3
    pair.step(1, [5, 1, 1])  # rows 0 to 3
    pair.step(0, [1, 1, 1, 2])  # the same
    pair.step(0, [30])  # ranged: never recorded
    assert executor.graphs.keys == [
        GraphKey(DECODE, 0), GraphKey(DECODE, 2), GraphKey(VERIFY + 1, 1), GraphKey(VERIFY + 1, 2),
        GraphKey(VERIFY + 2, 0),
    ]  # fmt: skip
    assert executor.graphs.replays == 6
    assert gpu.captures == 5


def test_capture_records_the_largest_first_and_leaves_the_caches_alone(tmp_path, entry):
    executor, gpu, engine = open_one(tmp_path, entry)
    pair = Pair(executor)
    pair.step(0, [7, 3, 9, 5])
    executor.capture([*executor.fixed_shapes(), StepShape(0, 1, 30, 30, 1), StepShape(0, 2, 3, 2, 2)])
    sizes = [entry.engine.limits.profiles[key.profile].num_tokens for key in executor.graphs.keys]
    assert sizes == [20, 10, 5, 4, 2, 1]
    assert [profile.name for profile in engine.runs[1:]] == [
        "verify 4x5", "verify 2x5", "verify 1x5", "decode 4x1", "decode 2x1", "decode 1x1",
    ]  # fmt: skip
    launched = gpu.calls["launch"]
    pair.step(0, [5, 5, 5, 1])
    pair.step(0, [1])
    assert gpu.calls["launch"] == launched + 2
    assert gpu.captures == 6
    executor.capture(executor.fixed_shapes())
    assert gpu.captures == 6


@pytest.mark.parametrize(("rows", "sizes"), [(1, [5, 1]), (2, [10, 5, 2, 1]), (3, [20, 10, 5, 4, 2, 1])])
def test_an_executor_of_few_rows_records_and_holds_only_what_they_need(tmp_path, entry, rows, sizes):
    executor, _, _ = open_one(tmp_path, entry, num_rows=rows)
    executor.capture(executor.fixed_shapes())
    assert [entry.engine.limits.profiles[key.profile].num_tokens for key in executor.graphs.keys] == sizes
    assert executor.kv_bytes == 2 * 128 * 2 * 74 * {1: 1, 2: 2, 3: 4}[rows]


def test_what_padding_writes(tmp_path, entry):
    """Our plugin skips padding; TensorRT's own attention writes it after what a row holds."""
    executor, gpu, _ = open_one(tmp_path, entry)
    runner = ModelRunner(executor)
    address = next(address for _, address in executor._parts.kv.addresses(0))
    keys = gpu.array(address, (ROWS, entry.engine.limits.kv_capacity, 128), "float16")[:, :, 0]
    values = gpu.array(address + keys.size * 256, (ROWS, entry.engine.limits.kv_capacity, 128), "float16")[:, :, 0]
    dense = entry.engine.lowering == "native"
    runner.step(0, [RowWork([3, 4], 2), RowWork([5], 1), RowWork([6], 1)])
    assert keys[:, :2].tolist() == [[3, 4], [5, 0], [6, 0], [0, 0]]
    assert (values != 0).sum(axis=1).tolist() == ([5] * 4 if dense else [2, 1, 1, 0])
    runner.kv.commit(2, 1)
    runner.move_row(2, 3)
    number = float(values[2, 0])  # the copy has not run yet
    runner.step(0, [RowWork([7, 8], 1), RowWork([5], 1), RowWork([6], 1)])
    assert keys[3].tolist() == [6] + [0] * (entry.engine.limits.kv_capacity - 1)
    assert values[3, 0] == number
    assert (values != 0).sum(axis=1).tolist() == ([5, 5, 5, 6] if dense else [2, 1, 1, 1])


def test_two_executors_record_into_memory_of_their_own(tmp_path):
    """The draft's recording and steps run between the target's, on the same GPU."""
    gpu = FakeGpu(1 << 25)
    target, draft = (Pair(open_one(tmp_path / name, gpu=gpu)[0]) for name in ("target", "draft"))
    for counts in ([7, 3, 9, 5], [1, 1, 1, 1], [5, 1, 2, 4], [1, 1, 1, 1], [5, 1, 2, 4]):
        target.step(0, counts)  # compares with a model of its own
        draft.step(0, counts[::-1])
    keys = [pair.executor.graphs.keys for pair in (target, draft)]
    assert all(keys), "both recorded"
    assert gpu.captures == sum(map(len, keys))


def test_a_failed_recording_is_told_once_and_steps_go_on(tmp_path, caplog):
    gpu = FakeGpu(fail_capture=1)
    executor, _, _ = open_one(tmp_path, gpu=gpu)
    pair = Pair(executor)
    with caplog.at_level(logging.WARNING):
        for counts in ([1], [1], [4], [4], [1, 1], [1], [4]):
            pair.step(0, counts)
    assert [record.message for record in caplog.records] == [
        "CUDA graphs are off, steps run one kernel at a time: profile 3: cudaErrorStreamCaptureInvalidated"
    ]
    assert executor.graphs.keys == [GraphKey(DECODE, 0)]
    assert gpu.captures == 2
    assert executor.graphs.replays == 2  # what had been recorded is still good


@pytest.mark.parametrize("ahead", [True, False])
def test_an_engine_that_cannot_be_recorded_runs_eagerly(tmp_path, caplog, ahead):
    executor, gpu, engine = open_one(tmp_path)
    engine.capturable = False
    if ahead:
        executor.capture(executor.fixed_shapes())
    pair = Pair(executor)
    for counts in ([1], [5, 2], [1], [1]):
        pair.step(0, counts)
    assert len(caplog.records) == 1
    assert gpu.calls["launch"] == 0


def test_an_engine_that_fails_while_it_is_recorded_leaves_the_stream_usable(tmp_path, caplog):
    executor, gpu, engine = open_one(tmp_path)
    pair = Pair(executor)
    original = gpu.begin_capture

    def begin():
        original()
        engine.broken = "decode 1x1"

    gpu.begin_capture = begin
    pair.step(0, [1])
    engine.broken = None
    assert "could not run the step" in caplog.text
    pair.step(0, [1])
    pair.step(0, [5])
    assert gpu._graphs == {}


def test_a_step_that_could_not_be_bound_leaves_nothing_half_bound(tmp_path, monkeypatch):
    executor, _, engine = open_one(tmp_path)
    pair = Pair(executor)
    pair.step(0, [20])
    context = engine.contexts[0]
    set_address = context.set_address

    def refuse(name, address):
        if name.startswith("k_cache"):
            raise SpecexportError("TensorRT could not bind")
        set_address(name, address)

    context.set_address = refuse
    with pytest.raises(SpecexportError, match="could not bind"):
        pair.runners[0].step(0, [RowWork([1] * 18, 1)])
    context.set_address = set_address
    pair.step(0, [20])  # as before it: sizes and addresses are bound again


def test_a_nan_is_minus_one_among_token_ids(tmp_path):
    executor, _, engine = open_one(tmp_path)
    runner = ModelRunner(executor)
    engine.model.logits_after = lambda ids: np.where(ids[-1] == 3, np.nan, np.arange(VOCAB)).astype(np.float32)
    assert runner.step(0, [RowWork([1, 3, 2], 3)], "token_ids").tolist() == [VOCAB - 1, -1, VOCAB - 1]


def test_rows_move_with_all_their_entries(tmp_path, entry):
    executor, gpu, _ = open_one(tmp_path, entry)
    pair = Pair(executor)
    pair.step(0, [7, 3, 9, 40])
    pair.step(3, [24])
    pair.move(3, 0)
    assert gpu.calls["copy_rows"] == 2
    pair.step(0, [1, 1, 1])
    pair.step(0, [4, 5, 2])
    assert executor.kv_bytes == 2 * ROWS * 128 * 2 * (CAPACITY + LOOKAHEAD + 1)
    with pytest.raises(SpecexportError, match="padded"):
        executor.move_entries(0, np.arange(2))


def test_a_row_holds_the_model_length_and_its_slack_and_no_scratch(tmp_path, entry):
    executor, _, _ = open_one(tmp_path, entry)
    assert executor.kv_capacity == CAPACITY
    pair = Pair(executor)
    pair.step(0, [20, 3, 9, 5])
    pair.step(0, [0, 60])
    for _ in range(5):
        pair.step(1, [1])
    with pytest.raises(SpecexportError, match="holds 69 entries"):
        pair.step(1, [2])
    assert len(pair.tokens[1]) == CAPACITY - 1
    pair.step(0, [1, 0, 1, 1])  # row 1 is as full as it can be, and is only there as padding now
    pair.step(0, [3, 0, 5, 1])
    pair.step(2, [1, 2])
    pair.step(1, [1])  # the layers' numbers of its last entries are still right


def test_steps_beyond_every_profile_name_the_flag(tmp_path):
    executor, _, _ = open_one(tmp_path)
    with pytest.raises(IncompatibleError, match=r"65 tokens.*64 \(--max-num-tokens\)"):
        executor.prepare(StepShape(0, 4, 65, 30, 1))


def test_too_little_memory_is_found_before_anything_is_allocated(tmp_path):
    gpu = FakeGpu(claims=100_000)
    with pytest.raises(IncompatibleError) as caught:
        open_one(tmp_path, gpu=gpu)
    assert "needs 0.2 MiB" in caught.value.message
    assert "KV cache of 4 rows 0.1 MiB" in caught.value.message
    assert "FakeGPU has 0.1 MiB free of 16.0 MiB" in caught.value.message
    assert "--max-num-seqs" in caught.value.hint
    assert "--max-model-len" in caught.value.hint
    assert gpu.closed
    assert gpu.calls.total() == 0


@pytest.mark.parametrize("free", range(20_000, 170_000, 25_000))
def test_memory_that_runs_out_on_the_way_is_given_back(tmp_path, free):
    gpu = FakeGpu(free, claims=1 << 30)
    with pytest.raises(IncompatibleError, match=r"wants .* of GPU memory; FakeGPU has") as caught:
        open_one(tmp_path, gpu=gpu)
    assert "model.sm89.engine" in caught.value.message
    assert gpu.in_use == 0
    assert gpu.closed


def test_close_gives_everything_back(tmp_path):
    executor, gpu, engine = open_one(tmp_path)
    executor.capture(executor.fixed_shapes())
    Pair(executor).step(0, [7, 3])
    assert gpu.in_use
    executor.close()
    executor.close()
    assert gpu.in_use == 0
    assert gpu.closed
    assert engine.closed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": None}, "does not describe"),
        ({"profiles": ()}, "does not describe"),
        ({"dtype": "int8"}, "does not describe"),
        ({"inputs": (*NATIVE, "moon_phase")}, "unknown inputs: moon_phase"),
        ({"layers": (*LAYERS, *LAYERS)}, "k_cache.1"),
        ({"layers": (LayerGeometry(1, 64, 128),)}, r"k_cache\.0 is \[-1, 1, 74, 128\]"),
        ({"inputs": NATIVE[:-1]}, "untile_index"),
        ({"layers": (LayerGeometry(1, 1, 128),)}, "cannot be bound by address"),
    ],
)
def test_manifests_that_do_not_fit_the_engine(tmp_path, changes, message):
    entry = make_entry(LOOKAHEAD, ROWS, MAX_LEN)
    executor, _, engine = open_one(tmp_path, entry)
    executor.close()
    changed, gpu = make_entry(LOOKAHEAD, ROWS, MAX_LEN, **changes), FakeGpu()
    with pytest.raises(IncompatibleError, match=message):
        TrtExecutor(changed, changed.engine.files[0], tmp_path, num_rows=4, driver=gpu, load=lambda *_: engine)
    assert gpu.in_use == 0
    assert gpu.closed


def test_an_engine_with_ranged_profiles_only(tmp_path):
    entry = make_entry(LOOKAHEAD, ROWS, MAX_LEN, profiles=(Profile("prefill", 4, 64, 64, 20),))
    executor, gpu, _ = open_one(tmp_path, entry)
    executor.capture(executor.fixed_shapes())
    pair = Pair(executor)
    for counts in ([7, 3, 9, 5], [1, 1, 1, 1], [5, 1, 0, 4], [1]):
        pair.step(0, counts)
    assert gpu.calls["launch"] == 0
    assert executor.kv_capacity == entry.engine.limits.kv_capacity


def test_a_row_that_ends_leaves_no_value_behind(tmp_path: Path) -> None:
    """Attention multiplies hidden entries by 0, so a NaN that a sequence left would reach the next one in its row."""
    model = FakeExecutor(17, 4, 80)
    executor, gpu, _ = open_fake(tmp_path, make_entry(), model)
    runner = ModelRunner(executor)
    for row in range(2):
        runner.step(row, [RowWork([3, 4, 5], 1)])
        runner.kv.commit(row, 3)
    for _, address in executor._parts.kv.addresses(0):
        gpu.array(address, (128,), "float16")[:] = np.nan
    with pytest.raises(AssertionError):  # the stand-in's attention looks at every entry, as TensorRT's may
        runner.step(0, [RowWork([6], 1)])
    runner.release_row(0)
    logits = runner.step(0, [RowWork([7, 8], 1)])
    np.testing.assert_array_equal(logits[0], model.logits_after([7, 8]))
    assert runner.step(1, [RowWork([9], 1)])[0].argmax() == model.logits_after([3, 4, 5, 9]).argmax()
    executor.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cache_entries_are_read_as_float32(tmp_path, dtype):
    executor, gpu, _ = open_one(tmp_path, make_entry(rows=ROWS, dtype=dtype))
    assert executor.kv_bytes == 2 * ROWS * 128 * 74 * (4 if dtype == "float32" else 2)
    (heads, k_dim, _), row = LAYERS[0], 2
    values = np.arange(heads * executor._parts.sizes.kv_capacity * k_dim, dtype=np.float32) % 128  # exact in all three
    cache, address = next(executor._parts.kv.addresses(row))
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    gpu.synchronize()  # the arena was still to be cleared
    gpu.bytes(address, cache.row_bytes)[:] = stored.view(np.uint8)
    found = executor.read_cache_entries(row, 3, 8)
    assert list(found) == [f"{kind}_cache.{layer}" for layer in range(len(LAYERS)) for kind in "kv"]
    expected = values.reshape(cache.shape)[:, 3:8]
    assert found[cache.name].dtype == np.float32
    np.testing.assert_array_equal(found[cache.name], expected)
