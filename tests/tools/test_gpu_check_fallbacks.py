"""Sections that go on where CUDA graphs are refused: their logic, on a CPU."""

from types import SimpleNamespace
from typing import Any

from specexport_runtime.executors.fake import FakeExecutor
from tools.gpu_check_lib import graphs, speed
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
    assert len(eager) == 6
    assert "x: step of 1 x 5 tokens, 16 past, eager, for want of graphs" in rows
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
