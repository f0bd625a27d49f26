"""``specexport bench``: what it prints and writes, how it ends, and what it imports."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from specexport.bench.records import read_json
from specexport.cli import main
from specexport_runtime.costs.curves import CostCurves, StepCost
from specexport_runtime.engine_options import EngineOptions
from tests.support.cases.refusals import line_of
from tests.support.fakes.bench_fakes import make_subject

CURVES = CostCurves(StepCost(9e-3, 1.25e-3), {"draft-model": StepCost(1e-3, 0.0)})


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "domain": "d", "prompt": f"w{i} w{i + 1}"} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def bundle(monkeypatch, request):
    """A bundle in name only: the command runs over fake engines."""
    options = getattr(request, "param", {})
    asked = []

    def open_subject(folder, given):
        asked.append(given)
        return make_subject(**options)

    monkeypatch.setattr("specexport.bench.subject.open_subject", open_subject)
    return asked


def test_ablation_writes_table_json_markdown_and_plots(tmp_path, bundle, prompts):
    out = {name: tmp_path / name for name in ("bench.json", "bench.md", "plots")}
    ended = run(
        "bundle", "--prompts", prompts, "--ablation", "--batch-size", "1,2", "--max-tokens", "12", "--repeats", 2,
        "--ignore-eos", "--threads", 1, "--no-spin", "--json", out["bench.json"], "--markdown", out["bench.md"],
        "--plots", out["plots"],
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert bundle == [EngineOptions(max_num_batched_tokens=512, num_threads=1, spin=False)]
    assert "Texts equal to plain greedy decoding: 80 of 80 (100 %)." in ended.stdout
    for method in ("plain", "lookup", "unpad-kv only (lookup)", "unpad-input only (lookup)", "vanilla (lookup)"):
        assert ended.stdout.count(f"| {method} ") == 2
    assert out["bench.md"].read_text() == ended.stdout
    assert "[20/20]" not in ended.stderr
    assert "[19/20] bench: " in ended.stderr
    assert "lookahead.png skipped" in ended.stderr
    assert sorted(path.name for path in out["plots"].iterdir()) == ["batch-size.png", "padding.png"]
    again = run("--from-json", out["bench.json"], "--plots", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert again.stdout == ended.stdout
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (out["plots"] / path.name).read_bytes()


def test_json_alone_is_printed_and_a_flag_of_earlier_releases_still_works(bundle, prompts, monkeypatch):
    asked = ["bundle", "--prompts", prompts, "--methods", "lookup", "--repeats", 1, "--quiet", "--json"]
    ended = run(*asked)
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["schema"] == "specexport.bench/1"
    old = run(*asked[:-1], "--tree-sizes=0")
    assert old.exit_code == 0, old.output
    assert not old.stderr, "a script is not told"
    assert "no such option" in line_of(run(*asked[:-1], "--tree-sizess", 0))


def measured(prompts, *arguments, exit_code=0):
    file = prompts.with_name("bench.json")
    ended = run("bundle", "--prompts", prompts, *arguments, "--repeats", 1, "--json", file)
    assert ended.exit_code == exit_code, ended.output
    return ended, read_json(file)


def test_options_reach_the_runs(bundle, prompts):
    ended, found = measured(
        prompts, "--num-prompts", 3, "--methods", "lookup,draft-model", "--no-unpad-input", "--quiet", "--static",
        "--num-speculative-tokens", "2,3", "--temperature", "0,0.5", "--max-tokens", "4:9", "--seed", 5, "--mix",
    )  # fmt: skip
    assert not ended.stderr
    assert {(record.cell.domain, record.num_prompts) for record in found.runs} == {("mixed", 3)}
    cells = [record.cell for record in found.runs]
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 2 * 2)
    assert {cell.unpad_input for cell in cells if cell.method != "plain"} == {False}
    assert {cell.unpad_kv for cell in cells} == {True}
    assert {cell.temperature for cell in cells} == {0, 0.5}
    assert {cell.batching for cell in cells} == {"continuous", "static"}
    assert {record.id for record in found.prompts} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("bundle", [{"curves": CURVES}], indirect=True)
def test_a_chosen_k_is_measured_beside_fixed_ones(tmp_path, bundle, prompts):
    asked = ["--methods", "draft-model", "--lookahead", "2,auto", "--max-tokens", 12, "--batch-size", "1,2"]
    ended, found = measured(prompts, *asked, "--plots", tmp_path / "plots")
    assert [record.cell.requested for record in found.runs] == [None, 2, "auto"] * 2
    assert "|    auto |".replace(" ", "") in ended.stdout.replace(" ", "")
    assert "K=auto, d" in ended.stderr
    assert "lookahead.png skipped" in ended.stderr
    assert (tmp_path / "plots" / "batch-size.png").exists()


@pytest.mark.parametrize("bundle", [{"broken": True}], indirect=True)
def test_a_different_text_ends_with_1_after_the_report(bundle, prompts):
    ended, found = measured(prompts, "--methods", "lookup", "--max-tokens", 8, exit_code=1)
    assert "7 of 8 (87.5 %)" in ended.stdout
    assert "prompt 'p3' differs from plain greedy decoding at token 4" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(found.different) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "lokup"], "did you mean 'lookup'"), (["--num-speculative-tokens", "9"], "built for 1 to 8"),
        (["--num-speculative-tokens", "two"], "not a list of whole numbers or `auto`"),
        (["--methods", "self"], "too few, can be left out in this bundle"),
        (["--batch-size", "0"], "a batch size is 0"), (["--repeats", "0"], "number of repeats is 0"),
        (["--temperature", "-1"], "a temperature is -1"), (["--temperature", "hot"], "not a list of numbers"),
        (["--seed", "-1"], "seed is -1"), (["--max-tokens", "0"], "number of new tokens is 0"),
        (["--max-tokens", "9:3"], "run backwards"), (["--max-tokens", "many"], "no length"),
        (["--threads", "0"], "--threads is 0"), (["--num-prompts", "0"], "number of prompts is 0"),
        (["--domains", "e"], "no prompt has the domain"), (["--prompts", "none.jsonl"], "cannot be read"),
        (["--ablation", "--methods", "lookup"], "--ablation already says"),
        (["--json", "missing/x.json"], "cannot be written"), (["--plots", "prompts.jsonl"], "is a file"),
        (["--from-json", "x.json"], "both"), (["--method", "lookup"], "--methods"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_line_and_code_2(bundle, prompts, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    ended = run("bundle", "--prompts", prompts.name, *arguments, "--quiet")
    assert said in line_of(ended)
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize("bundle", [{"draft": False}], indirect=True)
def test_draft_methods_need_a_draft_and_all_a_bundle(bundle, prompts, tmp_path):
    for arguments in (["--methods", "draft-model"], ["--ablation", "--drafter", "chained"]):
        assert "this bundle has no draft model" in line_of(run("bundle", "--prompts", prompts, *arguments))
    assert "neither a bundle" in line_of(run())


def test_imports_stay_light():
    script = (
        "import sys, pkgutil, importlib, specexport.bench as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'specexport.bench.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'matplotlib', 'scipy', 'torch', 'transformers', 'onnx', 'onnxruntime', 'tokenizers'}\n"
        "found = heavy & {name.split('.')[0] for name in sys.modules}\n"
        "assert not found, found"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_demo_bundle_is_measured(demo_bundle, tmp_path):
    file = tmp_path / "bench.json"
    ended = run(
        demo_bundle, "--domains", "code", "--num-prompts", 2, "--batch-size", 2, "--methods",
        "lookup,draft-model,chained,vanilla,unpad-kv,unpad-input", "--max-tokens", 12, "--repeats", 1, "--threads", 1,
        "--no-spin", "--json", file,
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    found = read_json(file)
    assert len(found.compared) == 7 * 2
    assert not found.different
    assert found.bundle["models"]["target"]["engine_sha256"]
    assert found.machine["versions"]["onnxruntime"]
