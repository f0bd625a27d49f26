"""``specexport tune``: what is measured and written, and how mistakes end."""

import json
import sys

import pytest
from click.testing import CliRunner
from tune_fakes import fake_bundles

from specexport.cli import main
from specexport.tune.measure import choose_lookahead, fit_prompt


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
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


SMALL = ["--batch-sizes", "1,2", "--contexts", "4,8", "--lookaheads", "2,4", "--tokens", 8, "--repeats", 2]


def test_every_k_is_measured_side_by_side(tmp_path, log, prompts):
    ended = run(tmp_path / "draft", "--prompts", prompts, *SMALL, "--num-prompts", 2, "-q", "--json")
    assert ended.exit_code == 0, ended.output
    data = json.loads(ended.stdout)
    assert [(c["drafter"], c["batch_size"], c["context"]) for c in data["cells"]] == [
        (name, size, context) for name in ("draft-model", "lookup") for size in (1, 2) for context in (4, 8)
    ]
    for cell in data["cells"]:
        rates = {int(k): rate for k, rate in cell["tokens_per_second"].items()}
        assert set(rates) == {0, 2, 4}
        assert min(rates.values()) > 0
        assert cell["lookahead"] == choose_lookahead(rates)
    asked = [entry for entry in log if entry[0] == "generate" and len(entry[3]) == 2]  # the others warm up
    runs = [(e[1].max_num_seqs, len(e[3][0]), e[2], e[5]["num_speculative_tokens"]) for e in asked]
    forth = [("none", None), *((name, k) for name in ("draft-model", "lookup") for k in (2, 4))]
    wanted = [
        (size, context, *way) for size in (1, 2) for ways in (forth, forth[::-1]) for context in (4, 8) for way in ways
    ]
    assert runs == wanted
    assert [entry[0] for entry in log if entry[0] != "generate"] == ["load", "close"] * 2


def test_a_file_a_table_and_a_plot(tmp_path, log, prompts):
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    ended = run(tmp_path / "plain", "--prompts", prompts, *SMALL, "--threads", 1, "--output", out, "--plot", plot)
    assert ended.exit_code == 0, ended.output
    assert "[0/24] tune: loading for batch size 1" in ended.stderr
    found = json.loads(out.read_text())
    assert {cell["drafter"] for cell in found["cells"]} == {"lookup"}
    assert found["command"] == ["specexport", *sys.argv[1:]]
    assert (found["settings"]["threads"], found["settings"]["prompts"]) == (1, ["prompts.jsonl"])
    assert "plain" in ended.stdout
    assert ended.stdout.count(" lookup ") == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_defaults_shrink_to_what_fits(tmp_path, log, prompts):
    ended = run(
        tmp_path / "plain", "--prompts", prompts, "--tokens", 4, "--repeats", 1, "--num-prompts", 1, "-q", "--json"
    )
    assert ended.exit_code == 0, ended.output
    cells = json.loads(ended.stdout)["cells"]
    assert {cell["context"] for cell in cells} == {60}
    assert {cell["batch_size"] for cell in cells} == {1, 4, 8}
    assert set(cells[0]["tokens_per_second"]) == {"0", "1", "2", "4", "6", "8"}


@pytest.mark.parametrize("ids", [[7], [1, 2], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 23])
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
        (["--drafter", "lokup"], "did you mean 'lookup'"),
        (["--drafter", "none"], "no drafter 'none' with a K to tune"),
        (["--drafter", "draft-model"], "no draft model"),
        (["--drafter", "self"], "too few, that can be left out"),
        (["--lookaheads", "1,9"], "the bundle was built for up to 8"),
        (["--lookaheads", "0"], "only plain decoding"),
        (["--lookaheads", "-1"], "a number of draft tokens is -1"),
        (["--lookaheads", "some"], "not a list of whole numbers"),
        (["--batch-sizes", "0,1"], "a batch size is 0"),
        (["--contexts", "0"], "a context is 0"),
        (["--contexts", "17"], "choose a context of at most 16"),
        (["--tokens", "1"], "number of new tokens is 1"),
        (["--repeats", "0"], "number of repeats is 0"),
        (["--num-prompts", "0"], "number of prompts is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--prompts", "none.jsonl"], "cannot be read"),
        (["--output", "missing/p.json"], "cannot be written"),
        (["--plot", "p.txt"], "unknown image format"),
        (["--plot", "missing/p.png"], "cannot be written"),
        (["--drafters", "lookup"], "--drafter"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(tmp_path, log, prompts, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    out = [] if "--output" in arguments else ["--output", "p.json"]
    ended = run("plain", "--prompts", prompts.name, "--tokens", 48, *out, *arguments, "--quiet")
    assert ended.exit_code == 2, ended.output
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not ended.stdout
    assert list(tmp_path.iterdir()) == [prompts]
    assert not log


def test_prompts_are_needed(tmp_path):
    ended = run(tmp_path)
    assert ended.exit_code == 2
    assert "--prompts" in ended.stderr


def test_what_is_no_bundle_is_named(tmp_path, prompts):
    ended = run(tmp_path / "none", "--prompts", prompts)
    assert ended.exit_code == 2
    assert "there is no folder" in ended.stderr
