"""``specexport tune`` of several bundles: whose turn it is, which draft is picked, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_fakes import TARGET, fake_bundles, open_fake

from specexport.bench.records import RunRecord
from specexport.cli import main
from specexport.tune.compare import describe_pick, pick_draft
from specexport.tune.measure import Tuner, _Run, choose_lookahead, describe_rounds
from specexport.tune.options import TuneOptions
from specexport.tune.report import describe_differences, describe_texts
from specexport.tune.table import TuneCell, TuneRounds
from specexport.tune.targets import check_same_target, name_bundles
from specexport.tune.texts import TextCheck
from specexport_runtime.errors import InvalidRequestError

SMALL = ["--batch-sizes", "2", "--contexts", "4,8", "--lookaheads", "2,4", "--tokens", 8, "--repeats", 2]


@pytest.fixture
def log(monkeypatch, tmp_path):
    """What was asked of the fake engines; the bundles are folders with the names that ``tune_fakes`` explains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5 w6 w4 w5"}\n')
    return fake_bundles(monkeypatch)


def run(*arguments):
    return CliRunner().invoke(main, ["tune", *map(str, arguments), "--prompts", "p.jsonl", "-q"])


def cells_of(rates, drafter="draft-model"):
    """A cell for each batch size and context, from ``{(batch size, context): {K: tokens/s}}``."""
    return [TuneCell(drafter, *place, choose_lookahead(found), found) for place, found in rates.items()]


def test_the_draft_with_the_most_tokens_is_picked():
    measured = {
        "int8": cells_of({(1, 64): {0: 100.0, 2: 180.0, 4: 150.0}, (8, 64): {0: 400.0, 2: 500.0, 4: 300.0}}),
        "int4": cells_of({(1, 64): {0: 100.0, 2: 190.0, 4: 200.0}, (8, 64): {0: 400.0, 2: 480.0, 4: 300.0}}),
        "bad": cells_of({(1, 64): {0: 100.0, 2: 50.0, 4: 40.0}, (8, 64): {0: 400.0, 2: 90.0, 4: 80.0}}),
    }
    # What copies text has no say in which draft is the best.
    measured["bad"] += cells_of({(1, 64): {0: 100.0, 2: 900.0}, (8, 64): {0: 400.0, 2: 900.0}}, "lookup")
    pick = pick_draft(measured)
    assert [tuple(cell) for cell in pick.cells] == [(1, 64, "int4", 4, 200.0, 2.0), (8, 64, "int8", 2, 500.0, 1.25)]
    assert pick.bundle == "int4"
    assert pick.speedups == pytest.approx({"int8": (1.8 * 1.25) ** 0.5, "int4": (2.0 * 1.2) ** 0.5, "bad": 1.0})
    assert describe_pick(pick) == "pick: int4 (1.55× plain; int8 1.50×; bad 1.00×)"
    assert json.loads(json.dumps(pick.to_json()))["cells"][1]["bundle"] == "int8"


def test_where_no_draft_pays_plain_decoding_is_picked():
    slow = {0: 100.0, 2: 60.0}
    measured = {
        "one": cells_of({(1, 64): {0: 100.0, 2: 130.0}, (8, 64): slow}),
        "two": cells_of({(1, 64): slow, (8, 64): slow}),
    }
    pick = pick_draft(measured)
    assert [(cell.bundle, cell.lookahead, cell.speedup) for cell in pick.cells] == [("one", 2, 1.3), (None, 0, 1.0)]
    nothing = pick_draft({"one": measured["two"], "two": measured["two"]})
    assert nothing.bundle is None
    assert "plain decoding" in describe_pick(nothing)


def test_rounds_are_described_by_the_counters_of_the_runs():
    def one(draft, verify, drafted, accepted):
        phases = {"draft": draft, "draft_prefill": 1.0, "draft_steps": 10, "verify": verify, "rounds": 5}
        return _Run(RunRecord(None, 0, 1, 9, 1.0, 9.0, 9.0, phases, {}), drafted, accepted, 5)

    runs = [one(1.1, 0.1, 10, 8), one(1.3, 0.2, 10, 8), one(9.0, 0.9, 20, 12)]
    found = describe_rounds(runs)
    assert found == pytest.approx((28 / 40, 1 + 28 / 15, 30.0, 40.0))
    plain = one(0.0, 0.1, 0, 0)
    plain.record.phases.update(draft_prefill=0.0, draft_steps=0)
    assert describe_rounds([plain._replace(draft_rounds=0)]) == (None, None, None, pytest.approx(20.0))
    plain.record.phases.update(verify=0.0, rounds=0)  # every text ended with its first token
    assert describe_rounds([plain._replace(draft_rounds=0)]) == (None, None, None, None)


def test_a_draft_like_the_target_is_always_right():
    options = TuneOptions(("draft-model",), (1,), (4,), (0, 2), tokens=7, repeats=1, num_prompts=1)
    subjects = {name: open_fake([], Path(name)) for name in ("draft-exact", "draft")}
    tuner = Tuner(subjects, ["w1 w2 w3"], options)
    found = tuner.run()
    (exact,), (other,) = found["draft-exact"], found["draft"]
    assert exact.rounds[2].acceptance_rate == 1.0
    assert exact.rounds[2].mean_accepted_length == 3.0  # one token comes with the prompt, then two rounds
    assert other.rounds[2].acceptance_rate < 1.0
    assert exact.rounds[0] == other.rounds[0] == TuneRounds(None, None, None, exact.rounds[0].verify_milliseconds)
    for rounds in (exact.rounds[2], other.rounds[2]):
        assert min(rounds.draft_milliseconds, rounds.verify_milliseconds) > 0
    assert exact.tokens_per_second[0] == other.tokens_per_second[0]  # plain decoding was measured once
    assert {name: check.to_json() for name, check in tuner.checks.items()} == {
        "draft-exact": {"compared": 2, "different": 0}, "draft": {"compared": 1, "different": 0},
    }  # fmt: skip


def test_the_bundles_take_turns(log):
    ended = run("draft", "draft-exact", *SMALL, "--num-prompts", 2, "--drafter", "lookup", "--drafter", "draft-model")
    assert ended.exit_code == 0, ended.output
    asked = [entry for entry in log if entry[0] == "generate" and len(entry[3]) == 2]  # the others warm up
    runs = [(len(e[3][0]), e[-1], e[2], e[5]["num_speculative_tokens"]) for e in asked]
    forth = [("draft", "none", None), ("draft", "lookup", 2), ("draft", "lookup", 4)]
    forth += [(name, "draft-model", k) for k in (2, 4) for name in ("draft", "draft-exact")]
    assert runs == [(context, *way) for ways in (forth, forth[::-1]) for context in (4, 8) for way in ways]
    others = [(entry[0], entry[-1]) for entry in log if entry[0] != "generate"]
    assert others == [("load", "draft"), ("load", "draft-exact"), ("close", "draft-exact"), ("close", "draft")]


def test_each_bundle_gets_its_table_and_the_best_is_named(log, tmp_path):
    ended = run("draft", "draft-exact", *SMALL, "--json", "--plot", "p.svg")
    assert ended.exit_code == 0, ended.output
    data = json.loads(ended.stdout)
    assert list(data) == ["schema", "tables", "pick"]
    assert set(data["pick"]) == {"bundle", "speedups", "cells"}
    assert data["pick"]["bundle"] in {"draft", "draft-exact", None}
    for name, key in (("draft", "k"), ("draft-exact", "key of draft-exact")):
        table = data["tables"][name]
        assert table["build_key"] == key
        assert table["settings"]["draft"]["source"] == "small"
        assert table["settings"]["texts"]["different"] == 0
        assert {cell["drafter"] for cell in table["cells"]} == {"draft-model"}
        assert all(set(cell["rounds"]) == {"0", "2", "4"} for cell in table["cells"])
    picture = (tmp_path / "p.svg").read_text()
    assert "<svg" in picture
    again = run("draft", "draft-exact", *SMALL)
    assert again.exit_code == 0, again.output
    for said in ("draft: tokens/s by", "draft-exact: tokens/s by", "2.5 MB", "int4", "fastest draft", "\npick: "):
        assert said in again.stdout
    assert "Texts equal to plain greedy decoding: 80 of 80." in again.stdout
    assert "warning" not in again.stderr


def test_a_head_is_compared_with_a_draft_model(log, tmp_path):
    ended = run("draft", "head-exact", *SMALL, "--json")
    assert ended.exit_code == 0, ended.output
    tables = json.loads(ended.stdout)["tables"]
    found = {name: {cell["drafter"] for cell in table["cells"]} for name, table in tables.items()}
    assert found == {"draft": {"draft-model"}, "head-exact": {"head"}}
    assert tables["head-exact"]["settings"]["draft"]["source"] == "thin"
    best = max(cell["rounds"]["4"]["acceptance_rate"] for cell in tables["head-exact"]["cells"])
    assert best == 1.0  # its own draft was measured, not the other one
    again = run("head-exact", "draft", *SMALL, "--drafter", "head", "--drafter", "draft-model", "--drafter", "lookup")
    assert again.exit_code == 0, again.output
    assert "thin" in again.stdout
    assert "small" in again.stdout


def test_other_texts_are_a_warning(log):
    ended = run("draft-broken", "draft", *SMALL, "--drafter", "draft-model", "--drafter", "lookup")
    assert ended.exit_code == 0, ended.output
    assert "warning: 8 of 80 texts of draft-broken differ" in ended.stderr  # one of each run with lookup
    assert "the first at token 4 (lookup, K=2, batch size 2, context 4, prompt 4)" in ended.stderr
    assert "texts of draft differ" not in ended.stderr
    assert "Texts equal to plain greedy decoding: 104 of 112." in ended.stdout


def test_a_missing_or_another_token_is_a_difference():
    check = TextCheck()
    check.compare([1, 2], [1, 2], "a")
    assert (check.to_json(), check.first) == ({"compared": 1, "different": 0}, None)
    check.compare([1], [1, 2], "b")
    check.compare([3, 2], [1, 2], "c")
    assert (check.to_json(), check.first) == ({"compared": 3, "different": 2}, "at token 1 (b)")
    assert describe_texts({"x": check, "y": TextCheck()}) == "Texts equal to plain greedy decoding: 1 of 3."
    assert len(describe_differences({"x": check, "y": TextCheck()})) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source_sha256": "d" * 64}, "checkpoint big (dddddddddddd) instead of big (aaaaaaaaaaaa)."),
        ({"quantize": "int8", "engine_sha256": "x"}, "than one: quantization int8 instead of none."),
        ({"dtype": "float16", "backend": "ort-cuda"}, "backend ort-cuda instead of ort-cpu, dtype float16 instead of"),
        ({"engine_sha256": "x"}, "engine file x instead of bbbbbbbbbbbb."),
    ],
)
def test_another_target_is_refused(changes, said):
    one, two = (open_fake([], Path(name)) for name in ("draft", "draft-exact"))
    check_same_target({"one": one, "two": two})
    different = replace(two, details=two.details | {"models": {"target": TARGET | changes}})
    with pytest.raises(InvalidRequestError) as error:
        check_same_target({"one": one, "again": two, "two": different})
    assert error.value.message.startswith("two has another target than one: ")
    assert said in error.value.message


def test_another_tokenizer_is_refused_and_another_file_name_is_not():
    one, two = (open_fake([], Path(name)) for name in ("draft", "draft-exact"))
    with pytest.raises(InvalidRequestError, match="two has another target than one: tokenizer eeee"):
        check_same_target({"one": one, "two": replace(two, details=two.details | {"tokenizer_sha256": "e" * 64})})
    moved = two.details | {"models": {"target": TARGET | {"source": "copy of big"}}}
    check_same_target({"one": one, "two": replace(two, details=moved)})


def test_engines_that_are_timed_while_they_are_built_may_differ():
    def built_for_a_gpu(name):
        target = TARGET | {"built_for": ["sm89"], "engine_sha256": f"hash of {name}"}
        made = open_fake([], Path(name))
        return replace(made, details=made.details | {"models": {"target": target}})

    check_same_target({name: built_for_a_gpu(name) for name in ("draft", "draft-exact")})


def test_bundles_of_one_name_are_called_by_their_folders(tmp_path):
    folders = [tmp_path / "a" / "draft", tmp_path / "b" / "draft"]
    first, second = (open_fake([], folder) for folder in folders)
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
        (["draft", "draft-exact"], ["--drafter", "lookup"], "add --drafter draft-model"),
        (["draft", "head-exact"], ["--drafter", "draft-model"], "leaves out that of head-exact"),
        (["draft", "draft-exact"], ["--drafter", "head"], "leaves out that of draft"),
        (["draft", "draft-short"], ["--lookaheads", "8"], "draft-short was built for up to 4"),
        (["draft", "draft-short"], ["--contexts", "25"], "a sequence of draft-short takes 32"),
        (["draft", "draft-exact"], ["--drafter", "draft-model", "--drafter", "self"], "drafter 'self'"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(log, tmp_path, bundles, arguments, said):
    ended = run(*bundles, "--tokens", 8, *arguments)
    assert ended.exit_code == 2, ended.output
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
    assert not log


def test_defaults_shrink_to_what_all_can(log):
    ended = run("draft", "draft-short", "--tokens", 4, "--repeats", 1, "--num-prompts", 1, "--batch-sizes", 1, "--json")
    assert ended.exit_code == 0, ended.output
    for table in json.loads(ended.stdout)["tables"].values():
        assert [cell["context"] for cell in table["cells"]] == [28]
        assert set(table["cells"][0]["tokens_per_second"]) == {"0", "1", "2", "4"}
