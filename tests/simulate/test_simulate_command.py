"""``specexport simulate``: tables, JSON, plot and errors."""

import importlib.util
import json
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner

from specexport.atomic import write_file
from specexport.cli import main
from specexport.simulate.model import StepPrice, batch_padding, best_draft_length, expected_speedup
from specexport_runtime.errors import UserInputError
from tests.support.cases.refusals import line_of

FAST = ["simulate", "--accuracy", "0.5,0.8", "--batch-size", "1,4", "--samples", "500"]


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_json_record_is_complete_and_repeatable(tmp_path):
    options = ["--hit-rate", 0.6, "--token-cost", 0.05, "--cost-ratio", 0.01, "--max-new-tokens", 20, "--seed", 7]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        result = run(*FAST, *options, "--json", file)
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(tmp_path.iterdir()) == files  # no temporary file stays
    found = json.loads(files[0].read_text())
    assert found["schema"] == "specexport.simulate/1"
    assert found["parameters"]["accuracies"] == [0.5, 0.8]
    assert found["parameters"]["cost"] == {"cost_ratio": 0.01, "token_cost": 0.05}
    assert len(found["rows"]) == 4
    row = found["rows"][3]
    exact = batch_padding(0.8, 4, 7, hit_rate=0.6)
    assert row["exact"] == exact._asdict() | {"ratio": exact.ratio}
    cost = StepPrice(0.01, 0.05)
    assert row["speedup"] == expected_speedup(0.8, 7, cost, batch_size=4, hit_rate=0.6)._asdict()
    assert row["best_draft_length"] == best_draft_length(0.8, cost, max_draft_length=16, batch_size=4, hit_rate=0.6)
    ratio = row["simulated"]["ratio"]
    assert row["deviations"] == pytest.approx((ratio["mean"] - exact.ratio) / ratio["standard_error"])
    assert set(row["generation"]) == {"rounds", "ratio", "idle", "cache_slots"}
    assert found["rows"][0]["deviations"] is None  # one sequence: no padding, no error
    assert run(*FAST, *options, "--seed", 8, "--json", files[0]).exit_code == 0
    other = json.loads(files[0].read_text())["rows"][3]
    assert (other["exact"], other["simulated"] == row["simulated"]) == (row["exact"], False)


@pytest.mark.parametrize("installed", [True, False])
def test_a_plot_is_written_or_the_extra_is_named(tmp_path, monkeypatch, installed):
    find_spec = importlib.util.find_spec
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    file = tmp_path / "figure.png"
    result = run(*FAST, "--plot", file)
    if installed:
        assert (result.exit_code, file.read_bytes()[:5]) == (0, b"\x89PNG\r"), result.output
        assert list(tmp_path.iterdir()) == [file]
    else:
        assert ".[bench]" in line_of(result)  # found out before the work
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--accuracy", "1.5"], "not a probability"), (["--accuracy", "high"], "not a list of numbers"),
        (["--batch-size", "4,0"], "batch size is 0"), (["--batch-size", "1.5"], "not a list of whole numbers"),
        (["--generations", "0"], "number of generations is 0"),
        (["--max-draft-length", "0"], "largest draft length is 0"), (["--token-cost", "inf"], "token cost is inf"),
        (["--seed", "-1"], "range"), (["--json", "missing/x.json"], "cannot be written"),
        (["--json", "."], "directory"), (["--plot", "x.bmp"], "unknown image format"),
        (["--acuracy", "1"], "--accuracy"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_line_and_code_2(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in line_of(run("simulate", *arguments))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "record.json"
    file.write_text("old")

    def fail(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserInputError, match="No space left"):
        write_file(file, fail)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_model_fits_what_ems_sd_measured():
    """docs/ems-sd.md, "Against EMS-SD's measurements": tokens/s of the paper's table 2, speedups of its figure 1."""
    batch = np.array([1, 2, 4, 8, 16, 24])
    plain = np.array([79.44, 137.49, 257.37, 468.89, 774.59, 936.45])
    ems_sd = np.array([3.94, 3.50, 2.83, 2.17, 1.63, 1.41])
    slope, fixed = np.polyfit(batch, batch / plain, 1)
    cost = StepPrice(token_cost=slope / fixed)

    def error(point):
        accuracy, hit_rate = point
        model = [expected_speedup(accuracy, 7, cost, batch_size=int(b), hit_rate=hit_rate).unpadded for b in batch]
        return np.sum((model / ems_sd - 1) ** 2)

    accuracy, hit_rate = min(product(np.arange(0.9, 0.97, 0.002), np.arange(0.65, 0.72, 0.002)), key=error)
    assert (round(accuracy, 3), round(hit_rate, 3), round(cost.token_cost, 4)) == (0.936, 0.682, 0.0401)
