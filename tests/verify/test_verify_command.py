"""``specexport verify`` on the demo bundle, and what it refuses."""

import json
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

from specexport.cli import main
from specexport.compile.bundle import find_up_to_date
from specexport.compile.places import remember_place
from specexport.verify.checkpoint import find_checkpoint
from specexport.verify.report import REPORT_NAME
from specexport.verify.sampling import SETTINGS, check_sampling
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckpointError

FAST = ["--max-prompts", "3", "--max-tokens", "12", "--num-samples", "1000", "--quiet"]


@pytest.fixture
def bundle(demo_bundle, tmp_path):
    return shutil.copytree(demo_bundle, tmp_path / "bundle")


def run(*args):
    return CliRunner().invoke(main, ["verify", *map(str, args)])


@pytest.mark.whole
@pytest.mark.slow
def test_the_demo_bundle_is_verified(bundle, demo_pair, tmp_path):
    before = load_manifest(bundle)
    command = [sys.executable, "-c", "from specexport.cli import main; main()", "verify", str(bundle), *FAST]
    # The names recorded in the manifest are looked for in the current folder.
    command += ["--json", "--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=demo_pair, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "passed"
    assert set(report["parts"]) == {"tensors", "neighbours", "greedy", "sampling"}
    assert {part["status"] for part in report["parts"].values()} == {"passed"}
    assert 0 < report["summary"]["target_max_relative"] < 1e-5
    assert report["summary"]["greedy_failures"] == 0
    assert {result["role"] for result in report["parts"]["tensors"]["results"]} == {"target", "draft"}
    assert (
        report == json.loads((bundle / REPORT_NAME).read_text()) == json.loads((tmp_path / "report.json").read_text())
    )
    manifest = load_manifest(bundle)
    check_files(bundle, manifest.files)
    assert manifest.verify == report["summary"]
    assert manifest.build_key == before.build_key
    assert find_up_to_date(bundle, before.build_key) == manifest
    assert SpecEngine.load(bundle, max_num_seqs=1).generate("def f(", SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.whole
def test_without_checkpoints_the_result_is_incomplete(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n\n{"prompt": "def f(x):", "id": 3}\n')
    result = run(bundle, *FAST, "--prompts", prompts, "--no-record")
    assert result.exit_code == 0, result.output
    assert "tensors    skipped: the target's checkpoint target (sha256 " in result.stdout
    assert "--draft-checkpoint" in result.stdout
    assert result.stdout.startswith("lossless: greedy yes, sampled yes; weights as the checkpoint's: not compared")
    assert "of 2 outputs identical" in result.stdout
    assert load_manifest(bundle).verify is None
    assert not (bundle / REPORT_NAME).exists()


def test_checkpoints_are_found_where_they_lay_when_the_bundle_was_built(demo_bundle, demo_pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = load_manifest(demo_bundle)
    for role in ("target", "draft"):
        assert find_checkpoint(manifest, role, None, demo_bundle) == str(demo_pair / role)
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="is not on this machine"):
        find_checkpoint(manifest, "target", None, demo_bundle)
    remember_place(str(demo_pair / "draft"), manifest.models["target"].source.sha256)
    with pytest.raises(CheckpointError, match="is not on this machine"):  # another one lies there now
        find_checkpoint(manifest, "target", None, demo_bundle)


def test_a_failed_part_exits_with_1_after_the_report(bundle, demo_pair, monkeypatch):
    def wrong_references(model, sequences):
        return [np.zeros((len(ids), 4096), np.float32) for ids in sequences]

    monkeypatch.setattr("specexport.verify.references.eager_references", wrong_references)
    few = partial(check_sampling, settings=SETTINGS[1:2], num_contexts=1)
    monkeypatch.setattr("specexport.verify.parts.check_sampling", few)
    result = run(bundle, *FAST, "--checkpoint", demo_pair / "target", "--draft-checkpoint", demo_pair / "draft")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "tensors failed" in result.stderr
    assert "Traceback" not in result.output
    assert "FAILED target, width 1" in result.stdout
    assert load_manifest(bundle).verify["status"] == "failed"
    assert (load_manifest(bundle).verify["greedy"], load_manifest(bundle).verify["sampling"]) == ("passed", "passed")
    check_files(bundle, load_manifest(bundle).files)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "{pair}/draft"], "not what this target was built from"),
        (["--checkpoint", "{tmp}/nothing"], "no such folder"), (["--require-checkpoint"], "checkpoint target (sha256"),
        (["--prompts", "{tmp}/nothing.jsonl"], "cannot be read"), (["--prompts", "{tmp}/latin.jsonl"], "not UTF-8"),
        (["--prompts", "{tmp}/text.jsonl"], "line 2"), (["--prompts", "{tmp}/fields.jsonl"], "line 1"),
        (["--prompts", "{tmp}/empty.jsonl"], "no prompts"),
        (["--prompts", "{tmp}/long.jsonl"], "this bundle takes 1 to"), (["--max-tokens", "1"], "max_tokens is 1"),
        (["--max-prompts", "0"], "max_prompts is 0"), (["--num-samples", "10"], "num_samples is 10"),
        (["--sead", "1"], "--seed"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(demo_bundle, demo_pair, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (tmp_path / "text.jsonl").write_text('{"prompt": "a"}\nplain text\n')
    (tmp_path / "fields.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "word " * 5000}))
    result = run(demo_bundle, *(arg.format(pair=demo_pair, tmp=tmp_path) for arg in args))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert load_manifest(demo_bundle).verify is None
