"""The sweep over architectures: its page names what the installed transformers has, and a few are tried for real."""

import re
from pathlib import Path

import onnx_ir as ir
import pytest

from tests.support.models.tiny_traces import keep_operator_table
from tests.support.references.ort_operators import assert_known
from tools.architecture_sweep import all_names, main, read_results, run_all, write_results
from tools.sweep_lib import table
from tools.sweep_lib.attempt import NOT_MADE, REFUSED, TIMEOUT, TRACEBACK, UNROLLED, WORKS, Outcome, attempt

PAGE = table.PAGE


def test_the_page_names_every_architecture_of_the_installed_transformers_once() -> None:
    """Another version: ``python tools/architecture_sweep.py --jobs 2``, then ``--table``."""
    import transformers

    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__} has" in text
    lines = text.split("## Works")[1].splitlines()
    named = [name for line in lines if line.startswith("`") for name in re.findall(r"`(.+?)`", line)]
    assert sorted(named) == sorted(all_names())
    works = re.search(r"\| works \| (\d+) \|", text)
    assert works is not None
    readme = PAGE.parents[1].joinpath("README.md").read_text(encoding="utf-8")
    assert f"[{works[1]} of the {len(named)} architectures](docs/architectures.md)" in readme


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.exports
@pytest.mark.parametrize(("name", "limit"), [("deepseek_v2", 1e-5), ("modernbert-decoder", 1e-5), ("zamba2", 3e-5)])
def test_an_architecture_is_made_built_and_compared(name: str, limit: float, tmp_path: Path) -> None:
    """Rotary embeddings in complex numbers; layers before a tied LM head; a block that several layers share."""
    keep_operator_table()
    outcome = attempt(name, tmp_path)
    assert (outcome.outcome, outcome.reason) == (WORKS, "")
    assert outcome.error is not None
    assert outcome.error < limit
    assert_known(ir.load(tmp_path / "bundle" / "target" / "model.onnx"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "compressed_sparse_attention, which keeps compressed entries"),
        ("qwen4_exp_text", "indexed_attention, which chooses the entries"),
    ],
)
def test_layers_without_a_plain_cache_are_refused_by_kind(name: str, reason: str, tmp_path: Path) -> None:
    outcome = attempt(name, tmp_path)
    assert outcome.outcome == REFUSED
    assert reason in outcome.reason


def test_what_happens_in_a_process_becomes_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, one that dies, and one that does not end, beside each other."""
    import os
    import time

    def act(name: str, folder: Path) -> Outcome:
        if name == "llama":
            os._exit(3)
        if name == "gpt2":
            time.sleep(600)
        return Outcome(name, str(folder.is_dir()), NOT_MADE, "why")

    monkeypatch.setattr("tools.architecture_sweep.attempt", act)
    found = {outcome.name: outcome for outcome in run_all(["llama", "gpt2", "opt"], jobs=3, minutes=0.05)}
    assert found["llama"].outcome == TRACEBACK
    assert found["gpt2"].outcome == TIMEOUT
    assert found["opt"] == Outcome("opt", "True", NOT_MADE, "why")


def test_results_of_another_version_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    results = {"opt": Outcome("opt", "OPTForCausalLM", WORKS, "", 1e-7, 3.0)}
    write_results(path, results)
    assert read_results(path) == results
    monkeypatch.setattr("transformers.__version__", "4.0.0")
    assert read_results(path) == {}


def test_the_page_is_written_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(table, "PAGE", page)
    names = {"opt": "OPT", "bart": "Bart", "llama": "Llama"}
    results = {
        "opt": Outcome("opt", "OPT", WORKS, layers=UNROLLED),
        "bart": Outcome("bart", "Bart", REFUSED, "bart (Bart) cannot be exported: it is <odd>."),
    }
    assert table.write_table(names, results) == 1  # one was not tried
    text = page.read_text(encoding="utf-8")
    assert "| works | 1 |" in text
    assert "`bart`:\nit is &lt;odd>\n" in text
    assert "## Not tried" in text
    results["llama"] = Outcome("llama", "Llama", WORKS, layers="its layers are in no list")
    assert table.write_table(names, results) == 0
    text = page.read_text(encoding="utf-8")
    assert "Of 2 deep models 1 have the same engine" in text
    assert "`llama`:\nits layers are in no list\n" in text


def test_an_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--only", "xyzzy"])
    assert caught.value.code == 2
    assert "transformers has no xyzzy" in capsys.readouterr().err
