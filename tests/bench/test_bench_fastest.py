"""``specexport bench`` with several values of K and contexts: what is measured, and which K is named."""

import json
import sys

import pytest
from click.testing import CliRunner

from specexport.bench.prompts import fit_prompt
from specexport.bench.summary import choose_lookahead
from specexport.cli import main
from tests.support.cases.refusals import line_of
from tests.support.fakes.bundle_fakes import fake_bundles


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w1 w2 w3", "w4 w5 w6 w4 w5", "w7")))
    return path


@pytest.fixture
def log(monkeypatch, tmp_path):
    """What was asked of the fake engines that stand for any bundle, which is only a folder."""
    return fake_bundles(monkeypatch)


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


SMALL = [
    "--batch-size", "1,2", "--contexts", "4,8", "--lookahead", "2,4", "--max-tokens", 8, "--repeats", 2, "--warmup", 0,
]  # fmt: skip


def test_every_k_is_measured_side_by_side_in_a_file_a_table_and_a_plot(tmp_path, log, prompts):
    out, plot, names = tmp_path / "out.json", tmp_path / "p.png", ("draft-model", "lookup")
    asked = [*SMALL, "--num-prompts", 2, "--methods", ",".join(names), "--threads", 1, "--json", out, "--plot", plot]
    ended = run(tmp_path / "draft", "--prompts", prompts, *asked)
    assert ended.exit_code == 0, ended.output
    data = json.loads(out.read_text())
    cells = [(c["drafter"], c["batch_size"], c["context"]) for c in data["fastest"]]
    assert cells == [(name, size, context) for size in (1, 2) for context in (4, 8) for name in names]
    for cell in data["fastest"]:
        rates = {int(k): rate for k, rate in cell["decode_tokens_per_second"].items()}
        assert set(rates) == {0, 2, 4}
        assert min(rates.values()) > 0
        assert cell["num_speculative_tokens"] == choose_lookahead(rates)
        assert cell["speedup"] == rates[choose_lookahead(rates)] / rates[0]
    assert data["pick"] is None
    assert data["command"] == ["specexport", *sys.argv[1:]]
    assert data["options"]["contexts"] == [4, 8]
    assert {(p["prompt_tokens"], p["context"]) for p in data["prompts"]} == {(4, 4), (8, 8)}
    asked = [entry for entry in log if entry[0] == "generate"]
    runs = [(e[1].max_num_seqs, len(e[3][0]), e[2], e[5]["num_speculative_tokens"]) for e in asked]
    ways = [("none", None), *((name, k) for name in names for k in (2, 4))]
    forth = [(context, *way) for context in (4, 8) for way in ways]
    assert runs == [(size, *each) for size in (1, 2) for order in (forth, forth[::-1]) for each in order]
    assert [entry[0] for entry in log if entry[0] != "generate"] == ["load", "close"] * 2
    assert f"[0/{len(runs)}] bench: loading for batch size 1" in ended.stderr
    assert "bench: lookup, batch size 2, context 8, K=4, prompts" in ended.stderr
    _, table, equal, *_ = ended.stdout[ended.stdout.index("Decode tokens/s by") :].split("\n\n")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert head[:7] == ["method", "batch", "context", "plain", "K=2", "K=4", "fastest K"]
    assert [(row[0], int(row[1]), int(row[2])) for row in rows] == cells
    assert {row[6] for row in rows} <= {"0 (plain)", "2", "4"}
    assert "Texts equal to plain greedy decoding" in equal
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = run("--from-json", out, "--plot", tmp_path / "again.png")
    assert again.exit_code == 0, again.output
    assert again.stdout == ended.stdout
    assert (tmp_path / "again.png").read_bytes() == plot.read_bytes()


def test_one_k_has_no_fastest(tmp_path, log, prompts):
    plot = tmp_path / "p.svg"
    asked = ["--methods", "lookup", "--max-tokens", 8, "--repeats", 1, "--plot", plot]
    ended = run(tmp_path / "plain", "--prompts", prompts, *asked, "-q")
    assert ended.exit_code == 0, ended.output
    assert "Decode tokens/s by" not in ended.stdout
    assert f"{plot} skipped: no method was measured at two values of K" in ended.stderr
    assert not plot.exists()


@pytest.mark.parametrize("ids", [[7], [1, 2], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("length", [1, 2, 5, 23])
def test_prompts_get_their_length_from_their_own_text(ids, length):
    made = fit_prompt(ids, length)
    assert len(made) == length
    assert made[-1] == ids[-1]
    assert set(made) <= set(ids)
    if length > 1:
        assert made[0] == ids[0]
    tail = min(len(ids), length) - 1
    assert made[length - tail :] == ids[len(ids) - tail :]
    if length == len(ids):
        assert made == ids


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({0: 100.0, 2: 150.0, 4: 180.0}, 4),
        ({0: 100.0, 2: 179.0, 4: 180.0}, 2),
        ({0: 100.0, 2: 100.5, 4: 80.0}, 0),
        ({0: 100.0}, 0),
    ],
)
def test_a_longer_draft_must_be_worth_it(rates, chosen):
    assert choose_lookahead(rates) == chosen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "0"], "a context is 0"),
        (["--contexts", "17"], "the bundle takes 64. Fix: choose a context of at most 16"),
        (["--plot", "p.txt"], "unknown image format"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(tmp_path, log, prompts, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    ended = run("plain", "--prompts", prompts.name, "--max-tokens", 48, "--json", "p.json", *arguments, "--quiet")
    assert said in line_of(ended)
    assert list(tmp_path.iterdir()) == [prompts]
    assert not log


def test_tune_names_its_successor():
    ended = CliRunner().invoke(main, ["tune", "engines/demo", "--lookaheads", "1,2"])
    assert "there is no command 'tune' any more. Fix: use `specexport bench " in line_of(ended)
    assert "tune" not in CliRunner().invoke(main, ["--help"]).stdout
