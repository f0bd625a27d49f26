"""The kernel sweep, and sections that go on where CUDA graphs are refused: their logic, on a CPU."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.kernels import tuning
from specexport.kernels.tuning import TileConfig
from specexport_runtime.executors.fake import FakeExecutor
from tools import gpu_check
from tools.gpu_check_lib import graphs, kernel_speed, kernel_sweep, speed, tile_table
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.rows import Recorder, Row, read_rows, write_report


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

    def measured(calls: Sequence[Any], **_: Any) -> tuple[float, str]:
        calls[0]()
        return milliseconds(tried[-1]), "a graph"

    make_inputs = kernel_speed.make_inputs
    gpu = SimpleNamespace(name="GPU", L2_cache_size=2**10, major=9, minor=0, multi_processor_count=132)
    large = {64, 128}
    for module, name, value in (
        (kernel_speed, "PASTS", (32, 64)),
        (kernel_sweep, "FIRST_PAST", 64),
        (kernel_speed, "NUM_SEQS", 1),
        (kernel_speed, "make_inputs", lambda case, dtype, _: make_inputs(case, dtype, "cpu")),
        (kernel_sweep, "time_rotating", measured),
        (kernel_sweep, "require_gpu", lambda: None),
        (kernel_sweep, "copy_bandwidth", lambda *_: 1000.0),
        (kernel_sweep, "fits", lambda tiles, _, *, small: (tiles.block_n not in large) == small),
        (launch, "ragged_attention", attention),
        (torch.cuda, "empty_cache", lambda: None),
        (tuning, "MEASURED", {}),
        (torch.cuda, "get_device_properties", lambda _: gpu),
    ):
        monkeypatch.setattr(module, name, value)
    kernel_sweep.sweep(context)
    rows = rows_of(context)
    assert "failed" not in {row.verdict for row in rows.values()}, rows
    small, wide = (rows[f"tiles, 64 past, {name}: best of 18"] for name in ("48 KiB at most", "larger"))
    assert (small.data["tiles"]["block_n"], small.data["tiles"]["num_warps"]) == (32, 8)
    assert (wide.data["tiles"]["block_n"], wide.data["tiles"]["num_stages"]) == (64, 2)
    # Three of the first length, and the table's own tiles, which they must beat everywhere.
    assert {"tiles, 32 past, 48 KiB at most: best of 4", "tiles, 32 past, larger: best of 4"} <= set(rows)
    small_tiles, any_tiles = tile_table.best_tiles(read_rows(context.recorder.path))
    assert small_tiles.key == (90, 128, small_tiles.tiles.block_m, True)
    assert any_tiles.key == (90, 128, any_tiles.tiles.block_m, False)
    assert small_tiles.tiles == any_tiles.tiles, "the best of the small set is the best of all here"
    assert (small_tiles.tiles.block_n, small_tiles.tiles.num_warps, small_tiles.tiles.num_stages) == (32, 8, 2)


def test_the_embedded_tiles_fit_their_set() -> None:
    pytest.importorskip("triton")
    first = next(kernel_sweep.candidates(90, small=True))
    assert kernel_sweep.fits(first, 90, small=True)
    tried = list(kernel_sweep.candidates(90, small=False))
    assert len(tried) == len(set(tried)) == 36


# from the sweep to the tuning table


def report_of_sweep(folder: Path, milliseconds: dict[tuple[int, bool], dict[tuple[int, int, int], float]]) -> Path:
    """A made-up report: times by (past, at most 48 KiB) and (entries, warps, stages); the first is the table's own."""
    recorder = Recorder(folder / "rows.jsonl", "3")
    for (past, small), times in milliseconds.items():
        ranked = [{"tiles": TileConfig(32, *key)._asdict(), "milliseconds": value} for key, value in times.items()]
        recorder.row("all", "", gpu="NVIDIA Made-Up 90", sm=90, head_size=128, past=past, small=small,
                     own=ranked[0]["tiles"], ranked=sorted(ranked, key=lambda item: item["milliseconds"]))  # fmt: skip
    write_report(folder, read_rows(recorder.path), [], {"calls": [{"time": "2027-01-02 03:04 UTC"}], "dry": False})
    return folder


SMALL, WIDE = {(32, 4, 3): 1.0, (16, 4, 4): 0.8, (32, 8, 2): 0.9}, {(64, 4, 3): 1.0, (128, 8, 2): 0.7}


def test_a_sweep_becomes_the_tuning_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = {(32, 4, 3): 2.0, (16, 4, 4): 1.9, (32, 8, 2): 1.5}
    results = report_of_sweep(
        tmp_path, {(8192, True): SMALL, (4096, True): later, (8192, False): WIDE, (4096, False): WIDE}
    )
    module = tmp_path / "measured.py"
    assert gpu_check.main(["tune", "--results", str(results), "--out", str(module)]) == 0
    found: dict[str, Any] = {}
    exec(module.read_text(), found)
    # (16, 4, 4) is the best behind 8,192 entries and far behind at 4,096; what fits 48 KiB may be the best of all.
    assert found["MEASURED"] == {(90, 128, 32, True): (32, 8, 2), (90, 128, 32, False): (128, 8, 2)}
    assert found["SOURCES"] == {90: "NVIDIA Made-Up 90, 2027-01-02 03:04 UTC"}
    monkeypatch.setattr(tuning, "MEASURED", found["MEASURED"])
    assert tuning.attention_tiles(90, 128, 20, small=True) == TileConfig(32, 32, 8, 2)
    assert tuning.attention_tiles(90, 128, 20) == TileConfig(32, 128, 8, 2)
    assert tuning.attention_tiles(80, 128, 20) == TileConfig(32, 64, 4, 2), "another architecture"
    written = module.read_text()
    monkeypatch.setattr(tile_table, "MEASURED", found["MEASURED"])
    monkeypatch.setattr(tile_table, "SOURCES", found["SOURCES"])
    monkeypatch.setattr(tile_table, "PLACE", module)
    tile_table.write_table([], "another day", module)
    assert module.read_text() == written, "what was measured before stays"


def test_no_gain_no_entry_and_no_sweep_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "measured.py"
    noise = {(32, 4, 3): 1.0, (16, 4, 4): 0.98}
    results = report_of_sweep(tmp_path, {(8192, True): noise, (8192, False): {(64, 4, 3): 0.9}})
    assert gpu_check.main(["tune", "--results", str(results), "--out", str(module)]) == 0
    assert module.read_text() == tile_table.PLACE.read_text()
    write_report(tmp_path, [], [], {"calls": [{"time": ""}], "dry": False})
    assert gpu_check.main(["tune", "--results", str(tmp_path), "--out", str(module)]) == 2
    assert "no rows of kernels.sweep" in capsys.readouterr().err
    write_report(tmp_path, [], [], {"calls": [{"time": ""}], "dry": True})
    assert gpu_check.main(["tune", "--results", str(tmp_path)]) == 2
    assert "dry run" in capsys.readouterr().err


def test_the_table_in_the_repository_is_as_the_command_writes_it(tmp_path: Path) -> None:
    tile_table.write_table([], "", tmp_path / "measured.py")
    assert (tmp_path / "measured.py").read_text() == tile_table.PLACE.read_text()
