"""The GPU executor's logic on a made-up onnxruntime that keeps "device" memory in numpy and checks every binding."""

import sys

import numpy as np
import pytest

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import BundleError, IncompatibleError, MissingDependencyError, SpecexportError
from specexport_runtime.executors import ort_cuda, ort_cuda_session, paged
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.cases import chance
from tests.support.cases.entries import changed
from tests.support.fakes.cuda_sessions import CAPACITY, ENTRY, INPUTS, LAYERS, ROWS, VOCAB, fake_ort, make_executor
from tests.support.fakes.fake_onnxruntime import view


@pytest.fixture
def ort(monkeypatch):
    return fake_ort(monkeypatch)


def fill(executor, shape, counts, kv_lens, tokens):
    buffers = executor.prepare(shape)
    buffers.input_ids[:] = tokens
    buffers.logit_rows[:] = np.arange(shape.num_logit_rows)
    buffers.kv_lens[:, 0] = kv_lens
    buffers.cu_new_tokens[:] = [0, *np.cumsum(counts)]
    return buffers


def fill_cache(executor, value):
    executor.driver.synchronize()
    view(("cuda", np.uint16, (executor.kv_bytes // 2,), executor._arena), np.uint16)[:] = value


@pytest.fixture
def hopper(monkeypatch):
    """A GPU for which steps of few tokens have a row for each."""
    monkeypatch.delenv(paged.CUDNN_SWITCH, raising=False)
    monkeypatch.setattr(ort_cuda, "compute_capability", lambda device_id: 90)


@pytest.mark.fuzz
@pytest.mark.parametrize("capability", [89, 90])
def test_ragged_steps_rollback_and_moves_equal_the_strict_fake(ort, capability, monkeypatch):
    monkeypatch.delenv(paged.CUDNN_SWITCH, raising=False)
    monkeypatch.setattr(ort_cuda, "compute_capability", lambda device_id: capability)
    executor, model = make_executor(), FakeExecutor(VOCAB, 1, 1)
    runner = ModelRunner(executor)
    rng = np.random.default_rng(chance.seed(0))
    texts = [rng.integers(1, VOCAB, paged.BLOCK_ENTRIES + 30).tolist() for _ in range(ROWS)]
    starts = [3, 60, paged.BLOCK_ENTRIES - 4, 1]
    for row, start in enumerate(starts):
        runner.prefill(row, texts[row][:start])
    done = list(starts)
    for turn in range(14):
        work = []
        for row in range(ROWS):
            right = texts[row][done[row] : done[row] + int(rng.integers(0, 4))]
            junk = rng.integers(1, VOCAB, 2).tolist() if right else []
            work.append(RowWork([*right, *junk], len(right) + 2) if right else IDLE)
        if all(item is IDLE for item in work):
            continue
        logits = runner.step(0, work)
        for row, item in enumerate(work):
            for j in range(len(item.tokens) - 2):
                expected = model.logits_after(texts[row][: done[row] + j + 1])
                np.testing.assert_array_equal(logits[runner.logit_starts[row] + j], expected)
            done[row] += max(0, len(item.tokens) - 2)
            runner.kv.commit(row, done[row])
        if turn == 6:  # the sequence of the last row takes the place of row 1's
            runner.release_row(1)
            runner.move_row(3, 1)
            texts[1], done[1] = texts[3], done[3]
            texts[3], done[3] = texts[3][::-1], 2
            runner.release_row(3)
            runner.prefill(3, texts[3][:2])
    assert done[0] > starts[0] + 10
    assert max(done) > paged.BLOCK_ENTRIES, "a row must go on in its second block"
    widest = {binding.inputs["block_table"][2][0] for binding, _ in ort.runs}
    assert (max(widest) > ROWS) == (capability == 90), "a row for each token"


def test_few_tokens_get_a_row_each_and_steps_of_the_same_sizes_share_a_graph(ort, hopper):
    executor, model = make_executor(), FakeExecutor(VOCAB, 1, 1)
    executor.capture(paged.token_row_shapes())
    texts = [[3, 4, 5], [6, 7], [8], [9, 10]]
    for row, text in enumerate(texts):
        fill(executor, StepShape(row, 1, len(text), len(text), 1), [len(text)], [0], text)
        executor.execute()
    executor.move_row(3, 2, 2)
    for counts in ([3, 1, 2], [1, 0, 5], [2, 4, 0]):
        shape = StepShape(0, 3, 6, max(counts), 6)
        fill(executor, shape, counts, [3, 2, 2], range(11, 17))
        logits = executor.execute()
        binding, config = ort.runs[-1]
        assert config == {"gpu_graph_id": str(2 * executor._graphs.sizes[StepShape(0, 6, 6, 1, 6)])}
        table = view(binding.inputs["block_table"], np.int32)
        assert table[:, 0].tolist() == np.repeat(executor._row_blocks[:3, 0], counts).tolist()
        at = 0
        for text, count in zip((texts[0], texts[1], texts[3]), counts, strict=True):
            for j in range(count):
                expected = model.logits_after([*text, *range(11 + at, 12 + at + j)])
                np.testing.assert_array_equal(logits[at + j], expected)
            at += count
    # Idle rows may make a step of two tokens two rows wide, and one of many tokens stays as it is.
    for shape, rows in (
        (StepShape(0, 2, 2, 2, 2), 2),
        (StepShape(0, 1, paged.MAX_TOKEN_ROWS + 1, paged.MAX_TOKEN_ROWS + 1, 1), 1),
    ):
        fill(executor, shape, [shape.num_tokens] + [0] * (shape.num_seqs - 1), [0] * shape.num_seqs, shape[2] * [7])
        np.testing.assert_array_equal(executor.execute()[0], model.logits_after([7]))
        assert ort.runs[-1][0].inputs["block_table"][2][0] == rows


@pytest.mark.parametrize(
    ("capability", "switch", "fields", "expected"),
    [
        (80, None, {}, False), (89, "1", {}, False), (90, None, {}, True), (90, "1", {"windows": (-1, -1)}, True),
        (120, None, {"feature_size": 8, "mask_token_id": 3}, True), (120, "0", {}, False), (0, None, {}, False),
        (90, None, {"windows": (-1, 64)}, False), (90, None, {"num_draft_heads": 3}, False),
        (90, None, {"inputs": (*INPUTS, "row_totals")}, False), (90, None, {"layers": ()}, False),
    ],
)  # fmt: skip
def test_a_row_for_each_token_is_for_causal_layers_that_cudnn_computes(capability, switch, fields, expected):
    environment = {} if switch is None else {paged.CUDNN_SWITCH: switch}
    assert paged.is_faster_with_token_rows(changed(ENTRY, **fields), capability, environment) is expected


def test_a_moved_row_is_not_copied(ort):
    executor = make_executor()
    runner = ModelRunner(executor)
    runner.prefill(2, [5, 6, 7])
    (gpu,) = ort.gpus
    before = gpu.waits, list(gpu.copies_in), len(gpu._queue)
    runner.move_row(2, 0)
    assert (gpu.waits, gpu.copies_in, len(gpu._queue)) == before
    runner.release_row(2)
    runner.prefill(2, [1, 2, 3, 4])  # the row it came from is another's now
    (logits,) = runner.step(0, [RowWork([8], 1)])
    np.testing.assert_array_equal(logits, FakeExecutor(VOCAB, 1, 1).logits_after([5, 6, 7, 8]))


def test_only_the_output_that_is_wanted_comes_back(ort):
    executor = make_executor()
    shape = StepShape(0, 2, 3, 2, 3)
    fill(executor, shape, [2, 1], [0, 0], [4, 5, 6])
    logits = executor.execute()
    assert logits.dtype == np.float32
    assert logits.shape == (3, VOCAB)
    (gpu,) = ort.gpus
    assert gpu.copies_out == [3 * VOCAB * 4]
    expected = logits.argmax(axis=1).tolist()
    ids = executor.execute(want="token_ids")
    assert ids.dtype == np.int64
    assert ids.tolist() == expected
    assert gpu.copies_out[1:] == [3 * 8]
    assert view(("cuda", np.float32, (3, VOCAB), executor.logits_address), np.float32).argmax(axis=1).tolist() == (
        expected
    ), "the logits stay on the device"


def test_a_step_costs_one_copy_each_way_and_one_wait(ort):
    executor = make_executor()
    (gpu,) = ort.gpus
    for first_row, kv_len in ((0, 0), (2, 0), (2, 1), (1, 0)):
        fill(executor, StepShape(first_row, 2, 2, 1, 2), [1, 1], [kv_len] * 2, [3, 4])
        executor.execute("token_ids")
    before = gpu.waits
    fill(executor, StepShape(0, 2, 2, 1, 2), [1, 1], [1, 1], [3, 4])
    executor.execute("token_ids")
    assert gpu.waits == before + 1
    assert len(gpu.copies_in) == len(gpu.copies_out) == 5
    bound = [[item for item in binding.inputs.items() if item[1][0] == "cuda"] for binding, _ in ort.runs]
    assert bound == bound[:1] * 5, "a size keeps its device memory, whatever the rows"
    assert all(config == {"gpu_graph_id": "-1"} for _, config in ort.runs)


def test_steps_of_all_sizes_share_one_buffer_of_each_kind(ort):
    """64 sizes, each of which had logits of its own."""
    executor = make_executor(cuda_graphs=True)
    sizes = [StepShape(0, rows, rows * new, new, rows * new) for rows in range(1, 5) for new in range(1, 17)]
    executor.capture(sizes)
    (gpu,) = ort.gpus
    used = gpu._used
    for shape in (*sizes, *sizes):
        counts = [shape.max_new_tokens] * shape.num_seqs
        fill(executor, shape, counts, [0] * shape.num_seqs, np.arange(shape.num_tokens) % 7)
        logits = executor.execute()
        np.testing.assert_array_equal(logits[0], FakeExecutor(VOCAB, 1, 1).logits_after([0]))
    assert len({binding.outputs["logits"][3] for binding, _ in ort.runs}) == 1
    assert {config["gpu_graph_id"] for _, config in ort.runs} == {str(2 * i) for i in range(1, 65)}
    pinned = 4 * 16 * VOCAB * 4 + executor._hosts[0]._block.memory.nbytes
    assert gpu._used - used == pinned, "nothing more on the device than before the first step"


def test_a_larger_step_moves_the_buffers_and_graphs_keep_theirs(ort):
    executor, model = make_executor(cuda_graphs=True), FakeExecutor(VOCAB, 1, 1)
    small, large = StepShape(0, 1, 1, 1, 1), StepShape(1, 1, 40, 40, 40)
    executor.capture([small])
    tokens = (np.arange(40) % 9).tolist()
    (gpu,) = ort.gpus
    addresses = []
    for turn in range(3):
        fill(executor, small, [1], [0], [5 + turn])
        np.testing.assert_array_equal(executor.execute()[0], model.logits_after([5 + turn]))
        addresses.append(executor.logits_address)
        fill(executor, large._replace(num_logit_rows=20 * (turn + 1)), [40], [0], tokens).logit_rows[:] = (
            np.arange(20 * (turn + 1)) % 40
        )
        logits = executor.execute()
        for row in (0, 19, 20 * turn + 19):
            np.testing.assert_array_equal(logits[row], model.logits_after(tokens[: row % 40 + 1]))
        assert executor.logits_address != addresses[0]
    assert addresses == addresses[:1] * 3
    executor.close()
    assert gpu.closed


def test_the_arena_is_whole_blocks_and_zeroed(ort):
    executor = make_executor()
    blocks = ROWS * 2
    expected = sum(
        blocks * paged.BLOCK_ENTRIES * layer.kv_heads * paged.paged_head_size(layer) * 2 * 2 for layer in LAYERS
    )
    assert executor.kv_bytes == expected
    assert [paged.paged_head_size(layer) for layer in LAYERS] == [16, 24]
    executor.driver.synchronize()
    assert not view(("cuda", np.uint8, (executor.kv_bytes,), executor._arena), np.uint8).any()


def test_exact_bounds_without_graphs_and_bounds_for_every_replay_with(ort):
    shape = StepShape(0, 2, 4, 3, 2)
    for graphs, expected in ((False, [3, 9, 9]), (True, [3, CAPACITY, 0])):
        executor = make_executor(cuda_graphs=graphs)
        executor.capture([shape])
        fill(executor, StepShape(1, *shape[1:]), [3, 1], [6, 5], [1, 2, 3, 4])
        fill_cache(executor, 1)
        executor.execute()
        binding, config = ort.runs[-1]
        assert view(binding.inputs["attention_metadata"], np.int32).tolist() == expected
        assert config == ({"gpu_graph_id": "2"} if graphs else {})
        assert ort.sessions[-1][0][1]["enable_cuda_graph"] == str(int(graphs))


def test_graphs_are_for_captured_sizes_only(ort):
    executor = make_executor(cuda_graphs=True)
    small, large, other = StepShape(0, 1, 1, 1, 1), StepShape(0, 4, 4, 1, 4), StepShape(0, 2, 2, 1, 2)
    executor.capture([small, large, StepShape(3, *small[1:])])
    assert not executor._steps, "nothing is allocated before it is used"
    for shape, graph_id in ((large, "4"), (small, "2"), (other, "-1"), (StepShape(2, *other[1:]), "-1")):
        fill(executor, shape, [1] * shape.num_seqs, [0] * shape.num_seqs, [1] * shape.num_tokens)
        executor.execute()
        assert ort.runs[-1][1] == {"gpu_graph_id": graph_id}


def test_graphs_are_on_unless_they_are_refused(ort, caplog):
    make_executor()
    assert ort.sessions[-1][0][1]["enable_cuda_graph"] == "1"
    ort.refuses_graphs = True
    executor = make_executor()
    assert ort.sessions[-1][0][1]["enable_cuda_graph"] == "0"
    (line,) = caplog.messages
    assert "CUDA graphs are off" in line
    shape = StepShape(0, 1, 1, 1, 1)
    executor.capture([shape])
    fill(executor, shape, [1], [0], [3])
    executor.execute()
    assert ort.runs[-1][1] == {}
    with pytest.raises(BundleError, match="graph capture"):
        make_executor(cuda_graphs=True)


@pytest.mark.parametrize("asked", [None, True])
def test_a_step_that_cannot_be_recorded_runs_without_unless_graphs_were_asked_for(ort, asked, caplog):
    executor, shape = make_executor(cuda_graphs=asked), StepShape(0, 1, 2, 2, 2)
    executor.capture([shape, StepShape(0, 1, 1, 1, 1)])
    executor._session.records = False
    for new in (1, 2, 2):
        fill(executor, StepShape(0, 1, new, new, new), [new], [0], [3, 4][:new])
        if asked:
            with pytest.raises(SpecexportError, match="stream is capturing"):
                executor.execute()
        else:
            expected = FakeExecutor(VOCAB, 1, 1).logits_after([3, 4][:new])
            np.testing.assert_array_equal(executor.execute()[-1], expected)
    executor.capture([shape])
    assert len(caplog.messages) == (0 if asked else 1)
    assert {config["gpu_graph_id"] for _, config in ort.runs} == (set() if asked else {"-1"})


def test_a_failure_of_a_graph_that_was_recorded_is_none_of_recording(ort):
    executor, shape = make_executor(), StepShape(0, 1, 1, 1, 1)
    executor.capture([shape])
    fill(executor, shape, [1], [0], [3])
    executor.execute()
    executor._session.broken = "CUDA error 700"
    with pytest.raises(SpecexportError, match=r"num_seqs=1.*CUDA error 700"):
        executor.execute()


def test_long_rows_of_one_token_have_a_graph_in_which_their_entries_are_split(ort):
    executor, shape = make_executor(kv_capacity=600), StepShape(0, 2, 2, 1, 2)
    executor.capture([shape])
    for kv_len, expected in ((511, ([1, 600, 0], "2")), (512, ([1, 600, 513], "3")), (511, ([1, 600, 0], "2"))):
        fill_cache(executor, 1)
        fill(executor, shape, [1, 1], [3, kv_len], [4, 5])
        executor.execute()
        binding, config = ort.runs[-1]
        assert (view(binding.inputs["attention_metadata"], np.int32).tolist(), config["gpu_graph_id"]) == expected


def test_what_a_graph_was_captured_with_stays(ort, monkeypatch):
    monkeypatch.setattr("specexport_runtime.executors.ort_cuda._MAX_SHAPES", 2)
    executor = make_executor(cuda_graphs=True)
    shape = StepShape(0, 1, 1, 1, 1)
    executor.capture([shape])
    for num_seqs in (1, 2, 3, 4, 1):
        fill(executor, StepShape(0, num_seqs, num_seqs, 1, 1), [1] * num_seqs, [0] * num_seqs, [1] * num_seqs)
        executor.execute()
        executor.capture([shape])
    assert ort.runs[0][0] is ort.runs[-1][0]
    assert ort.runs[-1][1] == {"gpu_graph_id": "2"}
    assert len(executor._steps) == 1 + 2


def test_bfloat16_is_bound_by_its_onnx_number(ort):
    ort.element_type = 16
    executor = make_executor(changed(ENTRY, dtype="bfloat16"))
    fill(executor, StepShape(0, 1, 1, 1, 1), [1], [0], [3])
    assert executor.execute().shape == (1, VOCAB)
    with pytest.raises(IncompatibleError, match="no paged attention for float32"):
        make_executor(changed(ENTRY, dtype="float32"))


def test_no_package_and_that_for_the_cpu_are_named_as_such(ort, monkeypatch):
    ort.providers = ["AzureExecutionProvider", "CPUExecutionProvider"]
    with pytest.raises(MissingDependencyError, match="`onnxruntime` and `onnxruntime-gpu` provide the same") as caught:
        make_executor()
    assert "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install -e '.[cuda]'" in str(caught.value)
    assert caught.value.exit_code == 2
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="onnxruntime-gpu is not installed"):
        make_executor()


def test_the_package_that_is_installed_here_is_refused_or_has_no_gpu():
    import onnxruntime

    expected = MissingDependencyError
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    with pytest.raises(expected, match=onnxruntime.__version__):
        make_executor()


@pytest.mark.parametrize(
    ("failure", "message", "hint"),
    [
        ("CUDA failure 2: out of memory", "GPU 0 has no memory left: CUDA failure 2", "end other programs"),
        ("CUDA failure 35: CUDA driver version is insufficient", "no GPU 0 for this bundle: CUDA failure 35", "580 or"),
        ("CUDA failure 100: no CUDA-capable device", "no GPU 0 for this bundle: CUDA failure 100", "specexport doctor"),
    ],
)
def test_no_gpu_is_exit_3_and_prints_nothing(ort, capsys, failure, message, hint):
    ort.OrtValue.ortvalue_from_shape_and_type = lambda *_: (_ for _ in ()).throw(RuntimeError(failure))
    with pytest.raises(IncompatibleError, match=message) as caught:
        make_executor()
    assert hint in caught.value.hint
    assert caught.value.exit_code == 3
    assert capsys.readouterr() == ("", "")
    assert ort.log_severity == 2, "onnxruntime logs as before"


@pytest.mark.parametrize(
    ("failure", "kind", "message", "hint"),
    [
        ("x.cc:1 f CUDA failure 2: out of memory ; GPU=0", IncompatibleError, "do not fit", "--quantize int4"),
        ("a.cc:9 (F) Failed to allocate memory for buffer of 9", IncompatibleError, "do not fit", "--quantize int4"),
        ("CUDA failure 209: no kernel image is available", IncompatibleError, "no code for this GPU", "doctor"),
        ("Protobuf parsing failed.", BundleError, "cannot load this engine", "specexport build --backend ort-cuda"),
    ],
)
def test_an_engine_that_gives_no_session_has_its_remedy(ort, monkeypatch, failure, kind, message, hint):
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: (_ for _ in ()).throw(RuntimeError(failure)))
    with pytest.raises(kind, match=message) as caught:
        make_executor()
    assert hint in caught.value.hint


def test_a_library_that_the_provider_lacks_is_named(ort, monkeypatch, tmp_path):
    """Without a driver it is ``libcuda.so.1``, which onnxruntime says in its log alone."""
    monkeypatch.setattr(ort, "__file__", str(tmp_path / "__init__.py"), raising=False)
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"no library")
    ort.has_gpu = False
    with pytest.raises(IncompatibleError, match=r"no GPU 0 for this bundle: .*libonnxruntime_providers_cuda\.so: "):
        make_executor()


def test_a_gpu_that_the_package_has_no_code_for_is_refused_by_name(ort, monkeypatch):
    monkeypatch.setattr(ort_cuda_session, "compute_capability", lambda _device: 100)
    make_executor()  # what another version has is not known
    ort.__version__ = "1.31.1"
    with pytest.raises(IncompatibleError, match=r"no code for .* 10\.0, as of a B200 or GB200; it has .*8\.9, 9\.0"):
        make_executor()


def test_an_arena_that_does_not_fit_says_so(ort):
    ort.gpu_bytes = 100_000
    with pytest.raises(IncompatibleError, match=r"the KV cache of 4 rows wants .* of GPU memory") as caught:
        make_executor()
    assert "--max-num-seqs" in str(caught.value)
    assert ort.gpus[0].closed, "what was there is given back"


def test_an_engine_that_does_not_match_is_refused(ort):
    ort.inputs = [name for name in ort.inputs if name != "block_table"]
    with pytest.raises(IncompatibleError, match="block_table"):
        make_executor()


def test_a_gpu_whose_memory_is_full_in_a_step_says_what_to_lower(ort):
    executor = make_executor()
    executor._session.broken = "(F) Failed to allocate memory for requested buffer of size 4096"
    fill(executor, StepShape(0, 1, 1, 1, 1), [1], [0], [3])
    with pytest.raises(IncompatibleError, match=r"no memory left in .*num_seqs=1.*buffer of size 4096") as caught:
        executor.execute()
    assert "--max-num-seqs" in caught.value.hint


def test_bfloat16_on_a_gpu_without_it_is_refused(ort, monkeypatch):
    monkeypatch.setattr(ort_cuda, "compute_capability", lambda device_id: 75)
    make_executor()
    with pytest.raises(IncompatibleError, match=r"bfloat16 needs compute capability 8\.0, and this GPU has 7\.5"):
        make_executor(changed(ENTRY, dtype="bfloat16"))


def test_misuse_raises(ort):
    executor = make_executor()
    with pytest.raises(SpecexportError, match="before prepare"):
        executor.execute()
    with pytest.raises(SpecexportError, match="does not fit 4 rows"):
        executor.prepare(StepShape(3, 2, 2, 1, 2))
    with pytest.raises(SpecexportError, match="no padded-KV graphs"):
        executor.prepare(StepShape(0, 1, 1, 1, 1, kv_span=64))
    with pytest.raises(SpecexportError, match="cannot move 2 entries of row 1"):
        executor.move_entries(1, np.array([0, 3]))
    executor.prepare(StepShape(0, 1, 1, 1, 1))
    executor.close()
    with pytest.raises(SpecexportError, match="before prepare"):
        executor.execute()
