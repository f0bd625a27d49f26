"""`generate` on the demo bundle: every source of prompts, every form of output, every refusal."""

import json

import pytest
from click.testing import CliRunner

from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.cli.output import describe_drafters, describe_unused
from specexport_runtime.machine import available_cores
from tests.support.cases.refusals import line_of

PROMPT = "def read_lines(path):\n"


@pytest.fixture
def run(demo_bundle):
    def invoke(*args, stdin=None, exit_code=0):
        result = CliRunner().invoke(
            runtime_cli, ["generate", str(demo_bundle), *map(str, args), "--threads", "1", "--no-spin"], input=stdin
        )
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


def refuse(run, *args, **options):
    return line_of(run(*args, exit_code=2, **options))


def records(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_all_sources_of_a_prompt_agree(run, tmp_path):
    (tmp_path / "p.txt").write_text(PROMPT)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    outputs = [
        run(PROMPT, "--max-tokens", 12).stdout,
        run("--prompt-file", tmp_path / "p.txt", "--max-tokens", 12).stdout,
        run("--max-tokens", 12, stdin=PROMPT).stdout,
        run("-", "--max-tokens", 12, stdin=PROMPT).stdout,
        run("--prompts", tmp_path / "p.jsonl", "--max-tokens", 12).stdout,
        run(PROMPT, "--max-tokens", 12, "--no-speculation").stdout,
    ]
    assert len(set(outputs)) == 1
    assert outputs[0].strip()


def test_stats_say_where_spinning_threads_may_be_in_the_way(demo_bundle, monkeypatch):
    def hint(*flags, load):
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
        command = ["generate", str(demo_bundle), PROMPT, "--max-tokens", "1", "--threads", "1", *flags]
        found = CliRunner().invoke(runtime_cli, command, catch_exceptions=False)
        return [line for line in found.stderr.splitlines() if line.startswith("load ")]

    cores = available_cores()
    told = f"load {cores + 0.5:.1f} on {cores} cores at the start: here --no-spin may be faster"
    assert hint("--stats", load=cores + 0.5) == [told]
    assert hint("--stats", load=cores) == []
    assert hint("--stats", "--no-spin", load=cores + 0.5) == []
    assert hint(load=cores + 0.5) == []


def test_no_memory_is_no_defect(run, monkeypatch):
    def refuse(*_, **__):
        raise MemoryError

    monkeypatch.setattr("specexport_runtime.engine.SpecEngine.load", refuse)
    result = run("x", exit_code=3)
    assert line_of(result, exit_code=3).startswith("error: not enough memory. Fix: end other programs")


def test_a_bad_form_is_named_by_its_flag_and_file(run, tmp_path):
    missing, file = tmp_path / "none.json", tmp_path / "form"
    assert refuse(run, "x", "--json-schema", missing) == (
        f"error: --json-schema {missing} cannot be read: No such file or directory. Fix: give a readable UTF-8 file."
    )
    for text, flag, said in (
        ('{"type": "objekt"}', "--json-schema", "Invalid type: objekt"),
        ("{", "--json-schema", " is no JSON"),
        ("start: (", "--grammar", ""),
    ):
        file.write_text(text)
        line = refuse(run, "x", flag, file)
        assert line.startswith(f"error: {flag} {file}")
        assert said in line
    assert refuse(run, "x", "--regex", "(").startswith("error: --regex: ")
    both = refuse(run, "x", "--regex", "a", "--choice", "b")
    assert both == "error: --regex and --choice were both given. Fix: give one form of the text."


def test_json_lines_have_every_field_and_full_precision(run, tmp_path):
    prompts = [PROMPT, "class Stack:\n", "import os\n"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n\n" for p in prompts))
    result = run("--prompts", tmp_path / "p.jsonl", "--json", "--max-tokens", 16, "--max-num-seqs", 2)
    found = records(result)
    assert [record["prompt"] for record in found] == prompts
    for record in found:
        assert set(record) == {"prompt", "text", "token_ids", "finish_reason", "stats"}
        stats = record["stats"]
        wanted = "num_generated_tokens rounds drafted accepted acceptance_rate mean_accepted_length"
        assert set(f"{wanted} tokens_per_second time_to_first_token_s".split()) <= set(stats)
        assert stats["num_generated_tokens"] == len(record["token_ids"])
        assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]
    single = records(run(PROMPT, "--json", "--max-tokens", 16))[0]
    assert single["token_ids"] == found[0]["token_ids"]


def test_stats_say_which_drafter_made_what(run):
    options = [PROMPT, "--max-tokens", 48, "--ignore-eos", "--drafter", "chained", "--stats"]
    text, record = run(*options), run(*options, "--json")
    stats = records(record)[0]["stats"]
    drafters = stats["drafters"]
    assert set(drafters) == {"lookup", "draft-model"}
    [line] = [line for line in text.stderr.splitlines() if line.startswith(tuple(drafters))]
    assert line in record.stderr.splitlines()
    assert line == describe_drafters(drafters, stats["rounds"] - sum(each["rounds"] for each in drafters.values()))
    each = drafters["draft-model"]
    assert f"draft-model {each['accepted']} of {each['drafted']} in {each['rounds']} round" in line
    plain = run(PROMPT, "--max-tokens", 4, "--no-speculation", "--stats")
    (line,) = plain.stderr.splitlines()
    assert "4 tokens in" in line
    assert "tokens in" not in plain.stdout


def test_stats_say_why_a_drafter_was_not_used():
    stats = {"rounds": 38, "drafters": {"draft-model": {"rounds": 2}, "suffix": {"rounds": 20}}}
    unused = {"draft-model": (1.1, -3.24), "suffix": (0.8, 1.0), "self": (0.918, 0.5)}
    assert describe_unused(stats | {"unused": unused}) == [
        "draft-model sat out 36 of 38 rounds: it promised 1.10 of plain decoding's speed, "
        "and its last drafts lost the time of 3.2 rounds",
        "self sat out 38 of 38 rounds: it promised 0.92 of plain decoding's speed",
    ]


def test_colour_marks_where_tokens_came_from(run):
    plain = run(PROMPT, "--max-tokens", 40).stdout
    coloured = run(PROMPT, "--max-tokens", 40, "--color").stdout
    assert "\x1b[32m" in coloured  # accepted
    assert "\x1b[31m" in coloured  # corrected
    assert "\x1b" not in plain
    assert "".join(part.split("m", 1)[-1] for part in coloured.split("\x1b[")) == plain


def test_sampling_flags_reach_the_sampler(run):
    sampled = [run(PROMPT, "--max-tokens", 20, "--temperature", 1.2, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    greedy = records(run(PROMPT, "--json", "--max-tokens", 8))[0]
    banned = greedy["token_ids"][0]
    biased = records(run(PROMPT, "--json", "--max-tokens", 8, "--logit-bias", f"{banned}=-100"))[0]
    assert banned not in biased["token_ids"]
    top1 = run(PROMPT, "--max-tokens", 8, "--temperature", 2, "--top-k", 1).stdout
    assert top1 == greedy["text"] + "\n"
    stop = greedy["text"][3:6]
    assert records(run(PROMPT, "--json", "--max-tokens", 8, "--stop", stop))[0]["text"] == greedy["text"].split(stop)[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["", "--max-tokens", 4], "the prompt is empty"),
        ([PROMPT, "--temperature", "-1"], "temperature"),
        ([PROMPT, "--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
        ([PROMPT, "--lookahead", "2", "--no-speculation"], "speculation is off"),
        ([PROMPT, "--logit-bias", "x=1"], "ID=BIAS"),
        ([PROMPT, "--logit-bias", "999999=1"], "999999"),
        ([PROMPT, "--max-model-len", "99999"], "max_model_len"),
        ([PROMPT, "--tempreture", "1"], "--temperature"),
        ([PROMPT, "--chat"], "no chat template"),
        (["word " * 3000], "tokens; this engine takes up to 1023"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        ([PROMPT, "--drafter", "lokup"], "did you mean 'lookup'?"),
        ([PROMPT, "--drafter", "lookup", "--no-speculation"], "drop one"),
        ([PROMPT, "--reference", "missing.txt"], "cannot be read"),
        ([PROMPT, "--lookahead", "automatic"], "neither an integer nor 'auto'"),
        ([PROMPT, "--drafter", "self", "--layer-threshold", "1.5"], "threshold is 1.5"),
        ([PROMPT, "--drafter", "self", "--layer-threshold", "high"], "neither a number nor 'off'"),
        ([PROMPT, "--drafter", "self", "--layer-threshold", "off", "--layer-period", "off"], "both off"),
        ([PROMPT, "--layer-period", "4"], "use drafter 'self'"),
        ([PROMPT, "--no-draft-exit", "--draft-exit-gamma", "0.5"], "drop one"),
        ([PROMPT, "--acceptance", "blok"], "acceptance is 'blok'. Fix: choose one of block, token."),
        ([PROMPT, "--tree-size", "64"], "from 0 (chains) to 63, or 'auto'"),
        ([PROMPT, "--tree-size", "auto", "--lookahead", "4"], "the number of draft tokens is not"),
        ([PROMPT, "--drafter", "lookup", "--draft-exit"], "none drafts here"),
        ([PROMPT, "--drafter", "lookup", "--corpus", "."], "--corpus was given, and no drafter uses it"),
        ([PROMPT, "--temperature", "0.8", "--seed", "3", "--suffix-memory", "4"], "add --drafter suffix or auto"),
        ([PROMPT, "--drafter", "draft-model", "--reference", __file__], "does not copy"),
        # What is not UTF-8 comes as halves of surrogate pairs.
        (["def \udcff", "--max-tokens", 4], "the prompt is no text: character 5 is '\\udcff'"),
        (["--chat", "\udcff"], "chat template"),
        ([PROMPT, "--\udcff"], "no such option '--\\udcff'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, words):
    assert words in refuse(run, *args)


def test_bad_prompt_files(run, tmp_path):
    path = tmp_path / "p"
    path.write_bytes(b"caf\xe9 au lait")
    assert "not UTF-8: byte 0xe9 at offset 3" in refuse(run, "--prompt-file", path)
    assert "not UTF-8" in refuse(run, "--prompts", path)
    assert "not UTF-8" in refuse(run, stdin=b"\xff\xfe")
    for content, words in (("", "has no prompts"), ('{"prompt": 3}\n', "not a text")):
        path.write_text(content)
        assert words in refuse(run, "--prompts", path)
    path.write_text("x")
    assert "both given" in refuse(run, PROMPT, "--prompt-file", path)


def test_how_sampled_drafts_are_accepted(run):
    options = ["--temperature", 1, "--seed", 7, "--max-tokens", 40, "--ignore-eos"]
    texts = [
        run(PROMPT, *options, *given).stdout for given in ([], ["--acceptance", "block"], ["--acceptance", "token"])
    ]
    assert texts[0] == texts[1] != texts[2]


def test_adaptive_lengths_and_traces(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path))
    options = ["--max-tokens", 24, "--ignore-eos"]
    plain = records(run(PROMPT, *options, "--json", "--no-speculation"))[0]
    assert "trace" not in plain
    result = run(PROMPT, *options, "--lookahead", "auto", "--trace", "--draft-exit", "--draft-exit-gamma", 0.3)
    assert result.stdout == plain["text"] + "\n"
    lines = result.stderr.splitlines()
    assert all(line.startswith("round ") for line in lines)
    assert any("draft-model K=" in line and "gamma 0.3" in line and " ms, " in line for line in lines)
    record = records(run(PROMPT, *options, "--drafter", "chained", "--trace", "--json"))[0]
    assert record["token_ids"] == plain["token_ids"] == [token for each in record["trace"] for token in each["emitted"]]
    assert {stage["reason"] for each in record["trace"] for stage in each["asked"]} <= {"fixed", "room"}
    known = [each["plain_milliseconds"] for each in record["trace"]]
    assert known[-1] > 0
    assert known.count(None) <= 4, "the first steps of a size tell nothing"


@pytest.mark.parametrize(
    "options",
    [
        ["--layer-threshold", "0.9", "--layer-period", "off", "--layer-keep-last", "1"],
        ["--layer-threshold", "off", "--layer-period", "2", "--draft-exit"],
    ],
)
def test_the_target_drafts_for_itself(run, options):
    shared = ["--max-tokens", 24, "--ignore-eos", "--drafter", "self", "--stats", *options]
    result = run(PROMPT, *shared)
    assert result.stdout == run(PROMPT, "--max-tokens", 24, "--ignore-eos", "--no-speculation").stdout
    assert "draft out of the target's own layers: without attention [" in result.stderr
    record = records(run(PROMPT, *shared, "--json"))[0]
    choice = record["stats"]["layer_choice"]
    removed = {"0.9": [], "off": list(range(1, choice["num_layers"] - 2, 2))}[options[1]]
    assert choice["removed_mlp"] == removed


@pytest.mark.parametrize("modes", [("--no-unpad-kv",), ("--no-unpad-kv", "--no-unpad-input")])
def test_the_padded_modes_write_the_same_text_and_count_their_padding(run, tmp_path, modes):
    prompts = [PROMPT, "class Stack:\n", "import os\nimport sys\nimport os\n"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    options = ["--prompts", tmp_path / "p.jsonl", "--drafter", "lookup", "--max-tokens", 32, "--ignore-eos", "--stats"]
    expected, result = run(*options), run(*options, *modes)
    assert result.stdout == expected.stdout
    assert "padding tokens fed 0\n" in expected.stderr
    assert ("padding tokens fed 0\n" in result.stderr) is ("--no-unpad-input" not in modes)
    assert "padding ratio" in result.stderr


def test_references_come_from_a_file_or_from_each_line(run, tmp_path):
    options = ["--max-tokens", 40, "--ignore-eos", "--json"]
    plain = records(run(PROMPT, *options, "--no-speculation"))[0]
    (tmp_path / "answer.txt").write_text(PROMPT + plain["text"])
    by_file = records(run(PROMPT, *options, "--drafter", "lookup", "--reference", tmp_path / "answer.txt"))[0]
    line = {"prompt": PROMPT, "reference": PROMPT + plain["text"]}
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    by_line = records(run("--prompts", tmp_path / "p.jsonl", *options, "--drafter", "lookup"))[0]
    without = records(run(PROMPT, *options, "--drafter", "lookup"))[0]
    assert plain["token_ids"] == by_file["token_ids"] == by_line["token_ids"] == without["token_ids"]
    assert by_file["stats"]["rounds"] == by_line["stats"]["rounds"] < without["stats"]["rounds"]


def test_what_was_generated_is_kept_in_the_suffix_file(run, tmp_path):
    file = tmp_path / "kept.npz"
    first, again = [run(PROMPT, "--suffix-file", file, "--stats", "--max-tokens", 24) for _ in range(2)]
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == again.stdout
    assert file.exists()
