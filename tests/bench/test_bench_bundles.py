"""``specexport bench`` of several bundles: whose turn it is, which draft is picked, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specexport.bench.bundles import check_same_target, compared_methods, join_subjects, name_bundles
from specexport.bench.methods import Cell
from specexport.bench.prompts import BenchPrompt
from specexport.bench.records import RunRecord
from specexport.bench.runner import run_bench
from specexport.bench.summary import Fastest, pick_draft, summarize
from specexport.cli import main
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError
from tests.support.cases.refusals import line_of
from tests.support.fakes.bench_fakes import make_options
from tests.support.fakes.bundle_fakes import TARGET, fake_bundles, open_fake

SMALL = [
    "--batch-size", "2", "--contexts", "4,8", "--lookahead", "2,4", "--max-tokens", 8, "--repeats", 2, "--warmup", 0,
]  # fmt: skip


@pytest.fixture
def log(monkeypatch, tmp_path):
    """What was asked of the fake engines; the bundles are folders with the names that ``bundle_fakes`` explains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5 w6 w4 w5"}\n')
    return fake_bundles(monkeypatch)


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments), "--prompts", "p.jsonl", "-q"])


def measured(*arguments):
    ended = run(*arguments, "--json", "out.json")
    assert ended.exit_code == 0, ended.output
    return json.loads(Path("out.json").read_text())


def found_of(bundle, rates, method="draft-model"):
    return [
        Fastest(
            Cell(method, method, True, True, size, 0, 0.0, "d", "continuous", context, bundle),
            {k: SimpleNamespace(decode_tokens_per_second=rate) for k, rate in found.items()},
        )
        for (size, context), found in rates.items()
    ]


def test_the_draft_with_the_most_tokens_is_picked():
    int8 = found_of("int8", {(1, 64): {0: 100.0, 2: 180.0, 4: 150.0}, (8, 64): {0: 400.0, 2: 500.0, 4: 300.0}})
    int4 = found_of("int4", {(1, 64): {0: 100.0, 2: 190.0, 4: 200.0}, (8, 64): {0: 400.0, 2: 480.0, 4: 300.0}})
    bad = found_of("bad", {(1, 64): {0: 100.0, 2: 50.0, 4: 40.0}, (8, 64): {0: 400.0, 2: 90.0, 4: 80.0}})
    # What copies text, and what asks others beside the draft, has no say in which draft is the best.
    others = found_of("", {(1, 64): {0: 100.0, 2: 900.0}, (8, 64): {0: 400.0, 2: 900.0}}, "lookup")
    others += found_of("bad", {(1, 64): {0: 100.0, 2: 900.0}, (8, 64): {0: 400.0, 2: 900.0}}, "chained")
    assert [(each.lookahead, each.speedup) for each in int8 + int4] == [(2, 1.8), (2, 1.25), (4, 2.0), (2, 1.2)]
    pick = pick_draft([*int8, *int4, *bad, *others])
    assert pick.bundle == "int4"
    assert pick.speedups == pytest.approx({"int8": (1.8 * 1.25) ** 0.5, "int4": (2.0 * 1.2) ** 0.5, "bad": 1.0})
    assert pick.describe() == "pick: int4 (1.55× plain; int8 1.50×; bad 1.00×)"


def test_where_no_draft_pays_plain_decoding_is_picked():
    slow = {0: 100.0, 2: 60.0}
    one = found_of("one", {(1, 64): {0: 100.0, 2: 130.0}, (8, 64): slow})
    two = found_of("two", {(1, 64): slow, (8, 64): slow})
    assert [(each.lookahead, each.speedup) for each in one] == [(2, 1.3), (0, 1.0)]
    assert (pick_draft(one + two).bundle, pick_draft(two)) == ("one", (None, {"two": 1.0}))
    assert "plain decoding" in pick_draft(two).describe()
    assert pick_draft(found_of("", {(1, 64): {0: 100.0, 2: 130.0, 4: 90.0}})) is None


def test_rounds_are_described_by_the_counters_of_the_runs():
    cell = found_of("one", {(1, 64): {}})[0].cell

    def row(*runs):
        records = []
        for repeat, (draft, verify, draft_steps, rounds) in enumerate(runs):
            phases = {"draft": draft, "draft_prefill": 1.0, "draft_steps": draft_steps, "verify": verify}
            phases |= {"rounds": rounds, "schedule": 0.0, "pack": 0.0, "total": 1.0}
            padding = {"accepted": 1, "padding": 0, "input_tokens": 1, "input_padding": 0}
            records.append(RunRecord(cell, repeat, 1, 9, 1.0, 9.0, 9.0, phases, padding))
        (found,) = summarize(SimpleNamespace(runs=records, prompts=[]))
        return found.draft_milliseconds, found.verify_milliseconds

    assert row((1.1, 0.1, 10, 5), (1.3, 0.2, 10, 5), (9.0, 0.9, 10, 5)) == pytest.approx((30.0, 40.0))
    assert row((1.0, 0.1, 0, 5)) == (None, pytest.approx(20.0))
    assert row((1.0, 0.0, 0, 0)) == (None, None)  # every text ended with its first token


def test_a_draft_like_the_target_is_always_right():
    log = []
    named = {name: open_fake(log, Path(name), EngineOptions()) for name in ("draft-exact", "draft")}
    methods = compared_methods(named, None, drafter="lookup")
    options = make_options(methods, num_speculative_tokens=(2,), max_tokens=(7, 7), contexts=(4,))
    result = run_bench(join_subjects(named), [BenchPrompt("p", "d", "w1 w2 w3")], options)
    plain, exact, other = summarize(result)
    assert (exact.cell.label, other.cell.label) == ("draft-model of draft-exact", "draft-model of draft")
    assert exact.acceptance_rate == 1.0
    assert exact.mean_accepted_length == 3.0  # one token comes with the prompt, then two rounds
    assert other.acceptance_rate < 1.0
    assert (plain.acceptance_rate, plain.mean_accepted_length, plain.draft_milliseconds) == (None, None, None)
    for row in (exact, other):
        assert min(row.draft_milliseconds, row.verify_milliseconds, row.speedup) > 0
    assert len(result.compared) == 3  # plain decoding was measured once
    assert not result.different


def test_the_bundles_take_turns(log):
    measured("draft", "draft-exact", *SMALL, "--methods", "lookup,draft-model")
    runs = [(e[-1], len(e[3][0]), e[2], e[5]["num_speculative_tokens"]) for e in log if e[0] == "generate"]
    ways = {"draft": [("none", None)], "draft-exact": []}
    ways["draft"] += [(name, k) for name in ("lookup", "draft-model") for k in (2, 4)]
    ways["draft-exact"] += [("draft-model", k) for k in (2, 4)]
    forth = [(name, context, *way) for name, each in ways.items() for context in (4, 8) for way in each]
    assert runs == forth + forth[::-1]
    loaded = [(entry[0], entry[-1]) for entry in log if entry[0] != "generate"]
    turns = ["draft", "draft-exact", "draft"]  # the second stays for its next turn; one is alive at a time
    assert loaded == [(what, name) for name in turns for what in ("load", "close")]


def test_each_bundle_gets_its_rows_and_the_best_is_named(log, tmp_path):
    asked = measured("draft", "draft-exact", *SMALL, "--methods", "draft-model,chained,lookup,vanilla")
    target_alone = {("plain", ""), ("lookup", ""), ("vanilla", "")}  # vanilla with --drafter lookup
    ours = {(method, name) for method in ("draft-model", "chained") for name in ("draft", "draft-exact")}
    assert {(run["method"], run["bundle"]) for run in asked["runs"]} == target_alone | ours
    data = measured("draft", "draft-exact", *SMALL, "--plot", "p.svg")
    assert set(data["pick"]) == {"bundle", "speedups"}
    assert data["pick"]["bundle"] in {"draft", "draft-exact", None}
    assert set(data["pick"]["speedups"]) == {"draft", "draft-exact"}
    assert data["texts"] == {"compared": 40, "different": 0}
    for name, key in (("draft", "k"), ("draft-exact", "key of draft-exact")):
        details = data["bundle"]["bundles"][name]
        assert details["build_key"] == key
        assert details["models"]["draft"]["source"] == "small"
        cells = [cell for cell in data["fastest"] if cell["bundle"] == name]
        assert {cell["drafter"] for cell in cells} == {"draft-model"}
        assert [(cell["batch_size"], cell["context"]) for cell in cells] == [(2, 4), (2, 8)]
        assert all(set(cell["decode_tokens_per_second"]) == {"0", "2", "4"} for cell in cells)
    assert "<svg" in (tmp_path / "p.svg").read_text()
    again = run("--from-json", "out.json")
    assert again.exit_code == 0, again.output
    for said in ("draft, draft-exact, all cores", "- draft: small, int4, 3 layers, 2.5 MB", "\npick: "):
        assert said in again.stdout
    assert again.stdout.count("| draft-model of draft-exact |") == 4 + 2
    assert "Texts equal to plain greedy decoding: 40 of 40" in again.stdout


def test_a_head_is_compared_with_a_draft_model(log):
    data = measured("draft", "head-exact", *SMALL)
    found = {(cell["bundle"], cell["drafter"]) for cell in data["fastest"]}
    assert found == {("draft", "draft-model"), ("head-exact", "head")}
    drafted = [prompt for prompt in data["prompts"] if prompt["bundle"] == "head-exact"]
    assert all(0 < prompt["drafted"] == prompt["accepted"] for prompt in drafted)  # its own draft, not the other one
    again = run("head-exact", "draft", *SMALL, "--methods", "head,draft-model,lookup")
    assert again.exit_code == 0, again.output
    assert "- head-exact: thin, int4, 1 layers, 2.5 MB" in again.stdout
    assert "- draft: small" in again.stdout


def with_target(bundle, changes, **details):
    return replace(bundle, details=bundle.details | {"models": {"target": TARGET | changes}} | details)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source_sha256": "d" * 64}, "checkpoint big (dddddddddddd) instead of big (aaaaaaaaaaaa)."),
        ({"quantize": "int8", "engine_sha256": "x"}, "than one: quantization int8 instead of none."),
        ({"dtype": "float16", "backend": "ort-cuda"}, "backend ort-cuda instead of ort-cpu, dtype float16 instead of"),
        ({"engine_sha256": "x"}, "engine file x instead of bbbbbbbbbbbb."),
        ({}, "than one: tokenizer eeee"),
    ],
)
def test_another_target_is_refused(changes, said):
    one, two = (open_fake([], Path(name), EngineOptions()) for name in ("draft", "draft-exact"))
    check_same_target({"one": one, "two": two})
    different = with_target(two, changes, **({} if changes else {"tokenizer_sha256": "e" * 64}))
    with pytest.raises(InvalidRequestError) as error:
        check_same_target({"one": one, "again": two, "two": different})
    assert error.value.message.startswith("two has another target than one: ")
    assert said in error.value.message


def test_targets_of_another_file_name_are_one_and_engines_that_are_timed_while_they_are_built_may_differ():
    one, two = (open_fake([], Path(name), EngineOptions()) for name in ("draft", "draft-exact"))
    check_same_target({"one": one, "two": with_target(two, {"source": "copy of big"})})
    built = [{"built_for": ["sm89"], "engine_sha256": f"hash {i}"} for i in range(2)]
    check_same_target({"one": with_target(one, built[0]), "two": with_target(two, built[1])})


def test_bundles_of_one_name_are_called_by_their_folders(tmp_path):
    folders = [tmp_path / "a" / "draft", tmp_path / "b" / "draft"]
    first, second = (open_fake([], folder, EngineOptions()) for folder in folders)
    second = replace(second, details=second.details | {"build_key": "another"})
    assert list(name_bundles(folders, [first, second])) == [str(folder) for folder in folders]
    assert list(name_bundles(folders, [first, replace(second, name="other")])) == ["draft", "other"]


@pytest.mark.parametrize(
    ("bundles", "arguments", "said"),
    [
        (["draft", "./draft"], [], "draft and draft are the same bundle"),
        (["draft", "plain"], [], "draft and plain are the same bundle"),  # two copies of one build
        (["draft", "draft-int8"], [], "draft-int8 has another target than draft: quantization int8"),
        (["draft", "no-model"], [], "no-model has no draft model and no head to compare"),
        (["draft", "draft-exact"], ["--methods", "lookup"], "add draft-model to --methods"),
        (["draft", "draft-exact"], ["--ablation"], "leaves out that of draft"),
        (["draft", "draft-exact"], ["--methods", "head"], "leaves out that of draft"),
        (["draft", "draft-short"], ["--lookahead", "8"], "draft-short was built for up to 4"),
        (["draft", "draft-short"], ["--contexts", "25"], "a sequence of draft-short takes 32"),
        (["draft", "draft-exact"], ["--methods", "draft-model,self"], "method 'self'"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(log, tmp_path, bundles, arguments, said):
    ended = run(*bundles, "--max-tokens", 8, *arguments)
    assert said in line_of(ended)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
    assert not log
