"""``specexport simulate``: table, JSON, plot, errors, and what it imports."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from specexport.atomic import write_file
from specexport.cli import main
from specexport.simulate.command import compute_row, format_table, simulate
from specexport.simulate.model import StepCost, batch_padding, best_draft_length, expected_speedup
from specexport_runtime.errors import UserInputError
from tests.support.cases.refusals import line_of

PAGES = [Path(__file__).parents[2] / "docs" / "ems-sd.md", Path(__file__).with_name("tables.md")]
FAST = ["simulate", "--accuracy", "0.5,0.8", "--batch-size", "1,4", "--samples", "500"]


STUDY = simulate.make_context("simulate", ["--draft-length", "5", "--samples", "200"]).params


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_table_has_the_exact_values():
    result = run(*FAST)
    assert result.exit_code == 0, result.output
    header, _, *rows = cells(result.stdout)
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["accuracy"], row["batch"]) for row in found] == [
        ("0.5", "1"),
        ("0.5", "4"),
        ("0.8", "1"),
        ("0.8", "4"),
    ]
    for row in found:
        exact = batch_padding(float(row["accuracy"]), int(row["batch"]), 7)
        assert float(row["accepted"]) == pytest.approx(exact.accepted, abs=6e-4)
        assert float(row["longest"]) == pytest.approx(exact.longest, abs=6e-4)
        assert row["ratio"] == f"{exact.ratio:.1%}"
        assert row["best K"] == "≥ 16"
    assert "padded" not in header  # equal to `speedup` without a token cost
    assert "standard errors" in result.stdout


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
    assert set(found["parameters"]) == {
        "accuracies", "batch_sizes", "draft_length", "hit_rate", "concentration", "cost", "max_draft_length", "samples",
        "max_new_tokens", "prompt_tokens", "generations", "seed",
    }  # fmt: skip
    assert found["parameters"]["accuracies"] == [0.5, 0.8]
    assert found["parameters"]["cost"] == {"cost_ratio": 0.01, "token_cost": 0.05}
    assert len(found["rows"]) == 4
    row = found["rows"][3]
    exact = batch_padding(0.8, 4, 7, hit_rate=0.6)
    assert row["exact"] == exact._asdict() | {"ratio": exact.ratio}
    cost = StepCost(0.01, 0.05)
    assert row["speedup"] == expected_speedup(0.8, 7, cost, batch_size=4, hit_rate=0.6)._asdict()
    assert row["speedup"]["padded"] < row["speedup"]["unpadded"]
    assert row["best_draft_length"] == best_draft_length(0.8, cost, max_draft_length=16, batch_size=4, hit_rate=0.6)
    ratio = row["simulated"]["ratio"]
    assert row["deviations"] == pytest.approx((ratio["mean"] - exact.ratio) / ratio["standard_error"])
    assert set(row["generation"]) == {"rounds", "ratio", "idle", "cache_slots"}
    assert found["rows"][0]["deviations"] is None  # one sequence: no padding, no error


def test_another_seed_moves_the_simulation_only():
    one, other = (compute_row(0.7, 4, STUDY | {"seed": seed}) for seed in (0, 1))
    assert one["exact"] == other["exact"]
    assert one["simulated"] != other["simulated"]


def test_generations_add_columns():
    table = format_table([compute_row(0.7, 4, STUDY | {"max_new_tokens": 20, "generations": 10})], 16)
    header, _, row = cells(table)
    assert header[-4:] == ["rounds", "ratio, whole", "idle", "cache"]
    assert all(row)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_written(tmp_path, ending):
    file = tmp_path / f"figure.{ending}"
    result = run(*FAST, "--plot", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes()[:5] in {b"\x89PNG\r", b"<?xml"}
    assert list(tmp_path.iterdir()) == [file]


def test_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", hide("matplotlib"))
    result = run(*FAST, "--plot", tmp_path / "figure.png")
    assert result.exit_code == 2
    assert "pip install -e '.[bench]'" in result.output
    assert "|" not in result.stdout  # found out before the work
    assert not list(tmp_path.iterdir())


def hide(hidden):
    import importlib.util

    find_spec = importlib.util.find_spec
    return lambda name, package=None: None if name == hidden else find_spec(name, package)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--accuracy", "1.5"], "not a probability"),
        (["--accuracy", "0.5,-0.1"], "not a probability"),
        (["--accuracy", "nan"], "not a probability"),
        (["--accuracy", "high"], "not a list of numbers"),
        (["--accuracy", ""], "not a list of numbers"),
        (["--batch-size", "4,0"], "batch size is 0"),
        (["--batch-size", "1.5"], "not a list of whole numbers"),
        (["--batch-size", "99999999"], "too many"),
        (["--draft-length", "0"], "draft length is 0"),
        (["--samples", "0"], "number of samples is 0"),
        (["--generations", "0"], "number of generations is 0"),
        (["--max-new-tokens", "0"], "number of new tokens is 0"),
        (["--max-draft-length", "0"], "largest draft length is 0"),
        (["--hit-rate", "2"], "not a probability"),
        (["--concentration", "0"], "concentration is 0"),
        (["--cost-ratio", "-1"], "cost ratio is -1"),
        (["--token-cost", "inf"], "token cost is inf"),
        (["--seed", "-1"], "range"),
        (["--json", "missing/x.json"], "cannot be written"),
        (["--json", "."], "directory"),
        (["--plot", "missing/x.png"], "cannot be written"),
        (["--plot", "x.bmp"], "unknown image format"),
        (["--acuracy", "1"], "--accuracy"),
    ],
)
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


def test_accuracies_zero_and_one_are_fine():
    result = run("simulate", "--accuracy", "0,1", "--batch-size", "1,3", "--samples", "10")
    assert result.exit_code == 0, result.output
    assert {row[5] for row in cells(result.stdout)[2:]} == {"0.0%"}


def test_imports_stay_light():
    script = (
        "import sys, pkgutil, importlib, specexport.simulate as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'specexport.simulate.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'matplotlib', 'scipy', 'torch', 'transformers', 'onnx', 'onnxruntime'}\n"
        "assert 'specexport.simulate.model' in sys.modules\n"
        "found = heavy & {name.split('.')[0] for name in sys.modules}\n"
        "assert not found, found"
    )
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def documented_tables():
    """Each `specexport simulate` of the documentation with the table printed below it."""
    pattern = r"```bash\nspecexport (simulate [^\n]*)\n```\n\n((?:\|[^\n]*\n)+)"
    return [found for page in PAGES for found in re.findall(pattern, page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("command", "table"), documented_tables(), ids=lambda value: value[:60])
def test_documented_tables_are_what_the_command_prints(command, table):
    exact = ("accuracy", "batch", "accepted", "longest", "padding", "ratio", "speedup", "padded", "best K")
    result = run(*command.split(), "--samples", "10")
    assert result.exit_code == 0, result.output
    for found, printed in zip(cells(result.stdout), cells(table), strict=True):
        columns = [i for i, name in enumerate(cells(table)[0]) if name in exact]
        assert [found[i] for i in columns] == [printed[i] for i in columns]


def test_documentation_has_tables():
    assert len(documented_tables()) == 1 + 4


def test_the_model_fits_what_ems_sd_measured():
    """docs/ems-sd.md, "Against EMS-SD's measurements": tokens/s of the paper's table 2, speedups of its figure 1."""
    batch = np.array([1, 2, 4, 8, 16, 24])
    plain = np.array([79.44, 137.49, 257.37, 468.89, 774.59, 936.45])
    ems_sd = np.array([3.94, 3.50, 2.83, 2.17, 1.63, 1.41])
    slope, fixed = np.polyfit(batch, batch / plain, 1)
    cost = StepCost(token_cost=slope / fixed)

    def error(point):
        accuracy, hit_rate = point
        model = [expected_speedup(accuracy, 7, cost, batch_size=int(b), hit_rate=hit_rate).unpadded for b in batch]
        return np.sum((model / ems_sd - 1) ** 2)

    accuracy, hit_rate = min(product(np.arange(0.9, 0.97, 0.002), np.arange(0.65, 0.72, 0.002)), key=error)
    assert (round(accuracy, 3), round(hit_rate, 3), round(cost.token_cost, 4)) == (0.936, 0.682, 0.0401)
