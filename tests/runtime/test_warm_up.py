"""Engines of ``ort-cuda`` run the first steps of rounds when they are opened, for a bounded time."""

from pathlib import Path

import numpy as np
import pytest

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors import ort_cuda
from specexport_runtime.executors.base import EngineRequest
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.ort_cuda import open_ort_cuda_executor
from specexport_runtime.executors.paged import CUDNN_SWITCH
from specexport_runtime.executors.warm_up import warm_up
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.fakes.cuda_sessions import ENTRY, VOCAB, FakeSession, fake_ort
from tests.support.fakes.fake_onnxruntime import view

LOOKAHEAD, ROWS = 4, 3


@pytest.fixture
def ort(monkeypatch):
    monkeypatch.delenv(CUDNN_SWITCH, raising=False)
    return fake_ort(monkeypatch)


def opened(role="target", **options):
    options = {"num_rows": ROWS, "kv_capacity": 600, "lookahead": LOOKAHEAD} | options
    return open_ort_cuda_executor(EngineRequest(folder=Path("b"), entry=ENTRY, role=role, **options))


def ran(ort):
    """Rows and tokens of each run, most entries of a row, and the graph's number."""
    return [
        (binding.inputs["kv_lens"][2][0], binding.inputs["input_ids"][2][0], config.get("gpu_graph_id"))
        for binding, config in ort.runs
    ]


@pytest.mark.parametrize(("role", "width"), [("target", LOOKAHEAD + 1), ("draft", 2)])
def test_sizes_of_rounds_are_recorded_before_the_first_request(ort, role, width, caplog):
    executor = opened(role)
    sizes = [(rows, rows * new) for rows in range(1, ROWS + 1) for new in (1, width)]
    found = ran(ort)
    assert [each[:2] for each in found] == [size for size in sizes for _ in range(2)], "few and many entries"
    numbers = {number for *_, number in found}
    assert "-1" not in numbers
    assert len(numbers) == 3 * ROWS, "rows of one token have two graphs"
    assert caplog.messages == [f"{Path('b') / ENTRY.engine.path}: warms up 12 steps, for about 3 s."]
    before = len(ort.runs)
    runner = ModelRunner(executor)
    for row, text in enumerate(([3, 4, 5], [6, 7])):
        runner.prefill(row, text)
    logits = runner.step(0, [RowWork([8], 1), RowWork([9], 1)])
    model = FakeExecutor(VOCAB, 1, 1)
    np.testing.assert_array_equal(logits, [model.logits_after([3, 4, 5, 8]), model.logits_after([6, 7, 9])])
    assert ran(ort)[-1] in found
    assert len(ort.runs) > before


def test_time_ends_it_behind_what_one_sequence_needs(ort):
    executor = opened(kv_capacity=40)
    ort.runs.clear()
    shapes = [StepShape(0, rows, rows, 1, rows) for rows in (1, 2, 3)]
    assert warm_up(executor, shapes, (0,), "this", 0.0) == 2
    assert [rows for rows, *_ in ran(ort)] == [1, 2]


def test_shorter_drafts_have_graphs_where_each_token_is_a_row(ort, monkeypatch):
    monkeypatch.setattr(ort_cuda, "compute_capability", lambda _device: 90)
    opened(num_rows=1)
    assert [rows for rows, *_ in ran(ort)] == [1, 1, 5, 5, 2, 2, 3, 3, 4, 4]
    lens = [int(view(binding.inputs["attention_metadata"], np.int32)[2]) for binding, _ in ort.runs]
    assert lens == [0, 513] * 5


def test_a_gpu_that_fails_leaves_nothing_behind(ort, monkeypatch):
    made = FakeSession.run_with_iobinding

    def broken(self, binding, options):
        made(self, binding, options)
        raise RuntimeError("CUDA failure 2: out of memory")

    monkeypatch.setattr(FakeSession, "run_with_iobinding", broken)
    with pytest.raises(SpecexportError, match="no memory left"):
        opened()
    assert ort.gpus[0].closed
