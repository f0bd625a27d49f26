"""``specexport bench`` with several values of K, and ``specexport explain``, on a real bundle."""

import json
from dataclasses import replace

import pytest

from specexport.compile.pipeline import build_bundle
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.user_cache import ROOT_VARIABLE
from tests.support.cases.entries import changed

FAST = ["--threads", "1", "--no-spin"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two three"}\n{"prompt": "four five one two"}\n')
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_bench_compares_the_drafts_of_one_target(run_cli, refuse_cli, tiny_bundle, tiny_pair, prompts, tmp_path):
    cut, another, file = tmp_path / "cut", tmp_path / "another", tmp_path / "out.json"
    build_bundle(tiny_pair.recipe(cut, draft_vocab_size=40))
    asked = ["--prompts", prompts, "--contexts", 8, "--lookahead", 2, "--max-tokens", 8, *FAST, "-q"]
    ended = run_cli("bench", tiny_bundle, cut, *asked, "--repeats", 1, "--num-prompts", 1, "--json", file)
    assert ended.exit_code == 0, ended.output
    data = json.loads(file.read_text())
    drafts = {name: details["models"]["draft"] for name, details in data["bundle"]["bundles"].items()}
    assert [draft["head_size"] for draft in drafts.values()] == [300, 40]
    assert all(draft["engine_bytes"] > 1000 for draft in drafts.values())
    assert set(data["pick"]["speedups"]) == {tiny_bundle.name, cut.name}
    assert data["texts"] == {"compared": 3, "different": 0}
    for each in data["runs"][1:]:
        assert min(each["phases"]["draft_steps"], each["phases"]["verify"]) > 0
    manifest = load_manifest(cut)
    target = changed(manifest.models["target"], sha256="0" * 64)
    another.mkdir()
    replace(manifest, name="another", build_key="0", models={**manifest.models, "target": target}).write(another)
    said = refuse_cli("bench", tiny_bundle, another, *asked)
    assert "another has another target than tiny-bundle: checkpoint target (000000000000) instead of" in said


@pytest.mark.parametrize(
    ("drafting", "temperature"),
    [
        ("--drafter draft-model --lookahead auto", 0),
        ("--drafter draft-model --lookahead auto", 0.9),
        ("--drafter self --lookahead 3 --layer-period 2 --layer-keep-last 0 --layer-threshold off", 0),
        ("--drafter lookup", 0.9),
        ("--no-speculation", 0),
    ],
)
def test_explain_tells_of_every_round(run_cli, gated_bundle, cache, drafting, temperature):
    asked = ["--max-tokens", 24, "--ignore-eos", "--temperature", temperature, "--seed", 3, *FAST]
    ended = run_cli("explain", gated_bundle, "one two three one two", *drafting.split(), *asked, "--json")
    assert ended.exit_code == 0, ended.output
    data = json.loads(ended.stdout)
    rounds = data["rounds"]
    emitted = [token for r in rounds for token in r["emitted"]]
    assert 0 < len(emitted) < len(data["token_ids"]) == 24  # the first round reads the prompt
    assert data["token_ids"][-len(emitted) :] == emitted
    for r in rounds:
        nodes = r["drafted"] + [token for token, _ in r["branches"]]
        path = range(r["accepted"]) if r["path"] is None else r["path"]
        assert r["emitted"][: r["accepted"]] == [nodes[place] for place in path]
        assert r["saved_milliseconds"] == pytest.approx(r["plain_milliseconds"] - r["milliseconds"])
    summary = data["summary"]
    assert summary["tokens"] == len(emitted)
    assert summary["drafted"] == sum(len(r["drafted"]) + len(r["branches"]) for r in rounds)
    assert summary["saved_milliseconds"] == pytest.approx(sum(r["saved_milliseconds"] for r in rounds))
    assert {v["drafter"] for v in summary["verdicts"]} == {r["drafter"] for r in rounds if r["drafted"]}
    assert sum(way["taken"] for way in summary["ways"]) == len(rounds)
    weighed = [{each["drafter"] for each in r["promised"]} for r in rounds]
    if "auto" in drafting:
        assert {"", "draft-model"} in weighed
        assert all("" in each for each in weighed if each)
    else:
        assert not any(weighed)
    if "self" in drafting:
        assert data["layers"]["removed_mlp"] == [1]
    if "--no-speculation" in drafting:
        assert not summary["drafted"]
        assert all(len(r["emitted"]) == 1 for r in rounds)
    if not temperature:
        engine = SpecEngine.load(gated_bundle, max_num_seqs=1, num_threads=1, spin=False)
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        (plain,) = engine.generate("one two three one two", params, drafter="none")
        engine.close()
        assert plain.token_ids == data["token_ids"]


def test_explain_prints_a_table_and_a_verdict(run_cli, tiny_bundle, cache, tmp_path):
    (tmp_path / "prompt.txt").write_text("one two three")
    (tmp_path / "reference.txt").write_text("one two three four five")
    ended = run_cli(
        "explain", tiny_bundle, "--prompt-file", tmp_path / "prompt.txt", "--drafter", "chained", "--max-tokens", 16,
        "--ignore-eos", "--reference", tmp_path / "reference.txt", "--color", *FAST, "--all",
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Drafting ")
    assert "draft ended" in ended.stdout
    assert "Verdict, " in ended.stdout
    assert "by what steps cost" in ended.stdout
    assert "\x1b[3" in ended.stdout
    asked = (tiny_bundle, "one two three", "--drafter", "suffix", "--max-tokens", 24, "--ignore-eos", *FAST, "--json")
    alone, traced = (json.loads(run_cli(name, *asked).stdout) for name in ("generate", "explain"))
    assert len(traced["rounds"]) + 1 == alone["stats"]["rounds"], "nothing is copied from what it is compared with"
    ended = run_cli("explain", tiny_bundle, "one two", "--max-tokens", 1, *FAST)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Nothing was drafted")
    assert "0 tokens in 0 rounds" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "psychic"], "there is no drafter 'psychic'"), (["--lookahead", "99"], "built for 1 to 8"),
        (["--max-tokens", "0"], "max_tokens"), (["--reference", "none.txt"], "none.txt"),
        (["--draft-exit-gamma", "2"], "gamma is 2"), (["--chat"], "chat template"),
        (["--drafters", "self"], "--drafter"),
    ],
)  # fmt: skip
def test_mistakes_of_explain(refuse_cli, tiny_bundle, monkeypatch, tmp_path_factory, tmp_path, arguments, said):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    assert said in refuse_cli("explain", tiny_bundle, "one two", *arguments, "--no-spin")
    assert "there is no folder" in refuse_cli("explain", tmp_path / "none", "one two")
    assert "prompt" in refuse_cli("explain", tiny_bundle)
