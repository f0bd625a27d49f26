"""The command line: how commands end, progress, tables, `inspect`, and how a build treats its process."""

import gc
import io
import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.text import Text

from specexport import cli
from specexport.host import collect_garbage_rarely
from specexport.progress import ProgressEvent, StageClock, show_progress
from specexport.report import Column, markdown_table, terminal_table
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.cli.errors import SuggestingGroup
from specexport_runtime.cli.lazy import Mount
from specexport_runtime.errors import CheckFailedError, IncompatibleError, MissingDependencyError, RecipeError
from specexport_runtime.executors.operators import kernels
from tests.support.cases.refusals import RunCli, line_of


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_of_the_table_can_be_used(run_cli: RunCli, name: str) -> None:
    if name not in cli.main.list_commands(click.Context(cli.main)):
        pytest.skip(f"{cli.COMMANDS[name].module} is not installed")
    result = run_cli(name, "--help")
    assert result.exit_code == 0, result.output
    assert f" {name} " in result.output.splitlines()[0]


def test_flags_follow_one_rule_and_help_begins_with_what_people_want_first(run_cli: RunCli) -> None:
    context = click.Context(cli.main)
    for name in cli.main.list_commands(context):
        command = cli.main.get_command(context, name)
        assert command is not None
        for option in (param for param in command.params if isinstance(param, click.Option) and not param.hidden):
            where = f"{name} {option.opts}"
            assert option.help, where
            assert option.help[0] != " ", where
            assert "[default" not in option.help.replace(".  [default: ", ""), where
            if "--lookahead" in option.opts:
                assert option.opts == ["--num-speculative-tokens", "--lookahead"], where
            assert option.opts[0] != "--json" or option.is_flag or option.metavar == "[FILE]", where
    for name, wanted in (("generate", "--max-tokens"), ("serve", "--port"), ("build", "--draft"), ("bench", "--wide")):
        first, *others = run_cli(name, "--help").output.partition("Options:\n")[2].split("\n\n")
        assert f"  {wanted} " in first, name
        assert 10 <= first.count("\n  -") + 1 <= 12, name
        assert others[-1].startswith("Rare:\n"), name
        assert all(section.partition("\n")[0].endswith(":") for section in others), name


def test_the_page_for_users_of_other_engines_names_commands_and_flags_that_there_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from.md"
    cells = [line.rsplit("|", 2)[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [words.split() for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    named = [words for words in found if words[0] in cli.COMMANDS]
    assert len(named) > 25
    for name, *rest in named:
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None
        known = {flag for param in command.params for flag in param.opts}
        assert {word for word in rest if word.startswith("-")} <= known, (name, rest)


def test_a_missing_part_hides_its_command_only(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fly", Mount("specexport.no.such.part", "fly", "Fly."))
    result = run_cli("--help")
    assert result.exit_code == 0
    assert "build" in result.output
    assert "fly" not in result.output
    assert run_cli("fly").exit_code == 2


@click.group(cls=SuggestingGroup)
def sample() -> None:
    """Raises what it is told to."""


@sample.command()
@click.argument("what")
def fail(what: str) -> None:
    raise {
        "recipe": RecipeError("K is\n bad", "do better."),
        "hardware": IncompatibleError("no"),
        "check": CheckFailedError("differs."),
        "interrupt": KeyboardInterrupt(),
        "disk": OSError(28, "No space left on device", "/some/file"),
    }[what]


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("recipe", 2, "error: K is bad. Fix: do better."),
        ("hardware", 3, "error: no."),
        ("check", 1, "error: differs."),
        ("interrupt", 130, "interrupted"),
        ("disk", 2, "error: the disk is full while writing /some/file."),
    ],
)
def test_how_commands_end(what: str, code: int, line: str) -> None:
    result = CliRunner().invoke(sample, ["fail", what])
    assert result.exit_code == code
    assert result.stderr.strip().startswith(line)
    assert CliRunner().invoke(sample, []).exit_code == 2, "a command decides its exit code, a group alone has none"


def test_stages_are_counted_and_timed() -> None:
    events: list[ProgressEvent] = []
    clock = StageClock(events.append, num_steps=4)
    with clock.stage("plan"):
        clock.note("thinking")
    clock.skip(2)
    with pytest.raises(ValueError, match="x"), clock.stage("load", "target", "name"):
        raise ValueError("x")
    assert [(event.stage, event.role, event.step, event.message) for event in events] == [
        ("plan", "", 1, ""),
        ("plan", "", 1, "thinking"),
        ("load", "target", 4, "name"),
    ]
    assert set(clock.seconds) == {"plan", "target.load"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_a_stage_off_a_terminal_and_a_bar_on_one() -> None:
    event = ProgressEvent("trace", "target", 3, 16, "llama")
    lines = io.StringIO()
    with show_progress(lines) as progress:
        progress(event)
        assert lines.getvalue() == "[3/16] target trace: llama", "said before it is done"
        progress(event._replace(stage="trial", step=4, message=""))
        progress(event._replace(stage="trial", step=4, message="int8 chosen"))
    shown = re.sub(r"  \d+\.\d s\n", "  SECONDS\n", lines.getvalue())
    assert shown == "[3/16] target trace: llama  SECONDS\n[4/16] target trial\n       int8 chosen  SECONDS\n"
    with show_progress(lines, quiet=True) as progress:
        progress(event)
    assert lines.getvalue().count("\n") == 3
    terminal = Terminal()
    with show_progress(terminal) as progress:
        progress(event)
    assert "3/16" in terminal.getvalue()
    assert "target trace: llama" in terminal.getvalue()


def test_inspect_needs_the_manifest_only(run_cli: RunCli, tiny_bundle: Path) -> None:
    short = run_cli("inspect", tiny_bundle)
    assert short.exit_code == 0, short.output
    assert 10 <= short.stdout.count("\n") <= 15
    memory = 256 * 512 / 1000  # tokens, bytes a token
    for words in ("for ort-cpu", f"up to 256 tokens a sequence; the memory of one that long: target {memory:.1f} kB",
                  "drafters:   draft-model, lookup, suffix", "chat:       has no", "not yet; `specexport verify`",
                  "--all shows", f"operators run here with: {kernels()}"):  # fmt: skip
        assert words in short.stdout, words
    result = run_cli("inspect", tiny_bundle, "--check-files", "--all")
    assert result.exit_code == 0, result.output
    for words in ("target: LlamaForCausalLM", "input_ids[T] int64", "KV cache: float32, 512 bytes a token",
                  "not verified yet", "lookahead K up to 8", "max_model_len 256", "every hash checked",
                  "torch 2.", "drafts for it: chains or trees", f"operators run here with: {kernels()}"):  # fmt: skip
        assert words in result.stdout, words
    assert result.stdout.index("target: ") < result.stdout.index("draft: ")
    data = json.loads(run_cli("inspect", tiny_bundle, "--json").stdout)
    assert data["models"]["target"]["kv_bytes_per_token"] == 2 * 2 * (16 + 16) * 4  # layers, heads, dims, bytes
    assert data["models"]["target"]["kernels"] == kernels()
    assert [data["models"][role]["takes_trees"] for role in ("target", "draft")] == [True, False]
    assert data["total_bytes"] == sum(entry["size"] for entry in data["files"].values())
    assert {"name": "logits", "dtype": "float32"}.items() <= data["models"]["draft"]["contract"][-3].items()


def test_inspect_shows_the_last_verification_and_what_it_can_without_operators(
    run_cli: RunCli, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise MissingDependencyError("it is missing.", "install it.")

    monkeypatch.setattr("specexport.inspect.kernels", missing)
    manifest = load_manifest(tiny_bundle)
    manifest_date = {"status": "passed", "date": "2026-01-02"}
    replace(manifest, verify=manifest_date).write(tmp_path)
    assert "verified:   passed, 2026-01-02\n" in run_cli("inspect", tmp_path).stdout
    replace(manifest, verify={"status": "passed", "target_max_abs": 1.23456e-6}).write(tmp_path)
    result = run_cli("inspect", tmp_path, "--all")
    assert result.exit_code == 0, result.output
    assert "verify: status=passed, target_max_abs=1.23e-06" in result.stdout
    assert "operators run here with: none: it is missing." in result.stdout
    assert json.loads(run_cli("inspect", tmp_path, "--json").stdout)["verify"]["target_max_abs"] == 1.23456e-6
    assert "there is no folder" in line_of(run_cli("inspect", tmp_path / "none"))
    (tmp_path / "manifest.json").unlink()
    assert "has no manifest.json" in line_of(run_cli("inspect", tmp_path))


def test_tables_have_the_cells_of_the_columns_that_are_shown_row_by_row() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "rate": 1.25, "gain": None}, {"name": "bc", "rate": 10.0, "gain": 0.5}]
    made: list[str] = []
    columns: list[Column[dict[str, Any]]] = [
        Column("name", lambda row: row["name"], left=True),
        Column("tokens/s", lambda row: row["rate"], ".1f"),
        Column("gain", lambda row: row["gain"], ".0%", " ±"),
        Column("hidden", lambda row: row["name"], shown=False),
    ]
    cells = [line.replace(" ", "").split("|")[1:-1] for line in markdown_table(columns, rows).splitlines()]
    assert [cells[0], *cells[2:]] == [["name", "tokens/s", "gain"], ["a", "1.2", "-"], ["bc", "10.0", "50%±"]]
    assert ":" in cells[1][1], "numbers are at the right"

    def one_by_one() -> Any:
        for row in rows:
            yield row
            made.append(row["name"])

    seen: Column[dict[str, Any]] = Column("seen", lambda row: Text(f"{row['name']} after {len(made)}", "green"))
    name, *_, last = terminal_table([*columns, seen], one_by_one()).columns
    assert (name.header, [str(cell) for cell in last.cells]) == ("name", ["a after 0", "bc after 1"])


class Node:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that builds; the suite freezes what test files import."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_made_within_is_collected_and_what_was_there_is_not_looked_at() -> None:
    before, within = Node(), []
    thresholds, old = gc.get_threshold(), weakref.ref(before)
    with collect_garbage_rarely():
        assert gc.get_threshold()[0] == 50_000
        node = Node()
        within.append(weakref.ref(node))
        del before, node
        gc.collect()
        assert within[0]() is None
        assert old() is not None, "it was there before"
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0, "a collection looks at it again"


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_else_froze_stays_frozen() -> None:
    node = Node()
    gc.freeze()
    with pytest.raises(ValueError, match="stop"), collect_garbage_rarely():
        raise ValueError("stop")
    assert not any(known is node for known in gc.get_objects()), "a collection looks at it again"
