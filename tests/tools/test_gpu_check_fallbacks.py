"""The kernel sweep, and sections that go on where CUDA graphs are refused: their logic, on a CPU."""

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest

from specexport_runtime.executors.fake import FakeExecutor
from tools.gpu_check_lib import graphs, kernel_speed, kernel_sweep, speed
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.rows import Row, read_rows


def rows_of(context: Context) -> dict[str, Row]:
    return {row.what: row for row in read_rows(context.recorder.path)}


def open_engine(graphs: bool) -> FakeExecutor:
    if graphs:
        raise RuntimeError("this stream cannot be captured")
    return FakeExecutor(61, 4, 300)


def test_a_section_goes_on_without_graphs_and_says_so(context: Context) -> None:
    context.tiny = True
    executor = speed.open_or_eager(context, "x: target", open_engine)
    assert isinstance(executor, FakeExecutor)
    graphs.compare(context, "x", open_engine)
    rows = rows_of(context)
    assert rows["x: target: CUDA graphs"].verdict == "missed"
    assert "this stream cannot be captured" in rows["x: target: CUDA graphs"].value
    assert rows["x: graphs"].verdict == "failed"
    eager = [row for name, row in rows.items() if name.endswith("eager, for want of graphs")]
    assert len(eager) == 4
    assert all(row.data["eager_ms"] > 0 for row in eager)


def test_an_engine_that_opened_and_cannot_be_recorded_is_closed_first(context: Context) -> None:
    closed: list[bool] = []

    class Unrecordable(FakeExecutor):
        def capture(self, shapes: Any) -> None:
            raise RuntimeError("no")

        def close(self) -> None:
            closed.append(True)

    def open_one(graphs: bool) -> FakeExecutor:
        assert graphs or closed == [True], "both would hold the weights"
        return (Unrecordable if graphs else FakeExecutor)(61, 4, 300)

    assert type(speed.open_or_eager(context, "w", open_one)) is FakeExecutor


def test_a_pool_that_gave_up_is_told_too(context: Context) -> None:
    executor = FakeExecutor(61, 4, 300)
    executor.graphs = SimpleNamespace(enabled=False)  # type: ignore[attr-defined]
    assert speed.open_or_eager(context, "y", lambda _: executor) is executor
    assert rows_of(context)["y: CUDA graphs"].verdict == "missed"
    executor.graphs = SimpleNamespace(enabled=True)  # type: ignore[attr-defined]
    speed.open_or_eager(context, "z", lambda _: executor)
    assert "z: CUDA graphs" not in rows_of(context)


def test_the_sweep_ranks_tiles_that_fit_and_takes_the_best_to_other_lengths(
    monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    import torch

    from specexport.kernels import launch

    context.seconds = 1000.0
    tried: list[Any] = []

    def attention(q: Any, k: Any, v: Any, kv_lens: Any, cu: Any, *, tiles: Any, scale: float, **_: Any) -> Any:
        past = int(kv_lens[0, 0])
        tried.append(tiles)
        return kernel_speed.expected(kernel_speed.case_of(past), q, k, v, scale).to(q.dtype)

    def milliseconds(tiles: Any) -> float:
        return 1.0 + abs(tiles.block_n - 32) / 100 + abs(tiles.num_warps - 8) / 10 + tiles.num_stages / 1000

    def measured(calls: Seq[Any], **_: Any) -> tuple[float, str]:
        calls[0]()
        return milliseconds(tried[-1]), "a graph"

    make_inputs = kernel_speed.make_inputs
    gpu = SimpleNamespace(L2_cache_size=2**10, major=9, minor=0, multi_processor_count=132)
    large = {64, 128}
    for module, name, value in (
        (kernel_speed, "PASTS", (32, 64)),
        (kernel_sweep, "FIRST_PAST", 64),
        (kernel_speed, "NUM_SEQS", 1),
        (kernel_speed, "make_inputs", lambda case, dtype, _: make_inputs(case, dtype, "cpu")),
        (kernel_sweep, "time_rotating", measured),
        (kernel_speed, "require_gpu", lambda: None),
        (kernel_sweep, "copy_bandwidth", lambda *_: 1000.0),
        (kernel_sweep, "fits", lambda tiles, _, *, small: (tiles.block_n not in large) == small),
        (launch, "ragged_attention", attention),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: gpu),
    ):
        monkeypatch.setattr(module, name, value)
    kernel_sweep.sweep(context)
    rows = rows_of(context)
    assert "failed" not in {row.verdict for row in rows.values()}, rows
    small, wide = (rows[f"tiles, 64 past, {name}: best of 18"] for name in ("48 KiB at most", "larger"))
    assert (small.data["tiles"]["block_n"], small.data["tiles"]["num_warps"]) == (32, 8)
    assert (wide.data["tiles"]["block_n"], wide.data["tiles"]["num_stages"]) == (64, 2)
    assert {"tiles, 32 past, 48 KiB at most: best of 3", "tiles, 32 past, larger: best of 3"} <= set(rows)


def test_the_embedded_tiles_fit_their_set() -> None:
    pytest.importorskip("triton")
    first = next(kernel_sweep.candidates(90, small=True))
    assert kernel_sweep.fits(first, 90, small=True)
    tried = list(kernel_sweep.candidates(90, small=False))
    assert len(tried) == len(set(tried)) == 36
