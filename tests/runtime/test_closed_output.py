"""Who reads the output goes away (``… | head``): the command ends quietly, with the exit code of SIGPIPE."""

import io
import os
import subprocess
import sys

import click
import pytest

from specexport.cli import main
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.cli.errors import SuggestingGroup
from tests.support.cases.manifests import MANIFEST, write


@pytest.fixture(params=[False, True], ids=["buffered", "unbuffered"])
def close_output(request, monkeypatch):
    """Makes standard output one that nobody reads; pytest puts its own there after the fixtures."""
    streams = []

    def close():
        read, broken = os.pipe()
        os.close(read)
        raw = io.FileIO(broken, "w")
        binary = raw if request.param else io.BufferedWriter(raw)
        streams.append(io.TextIOWrapper(binary, encoding="utf-8", write_through=request.param))
        monkeypatch.setattr(sys, "stdout", streams[-1])

    yield close
    for stream in streams:
        stream.close()  # what is left goes nowhere, and raises nothing


def run(cli, *args):
    with pytest.raises(SystemExit) as ended:
        cli([*map(str, args)])
    return ended.value.code


def doing(action):
    cli = SuggestingGroup()
    cli.add_command(click.Command("go", callback=action))
    return cli


def print_with_rich():
    from rich.console import Console

    Console(file=sys.stdout).print("x")


ACTIONS = {
    "echo": lambda: click.echo("x"),
    "print": lambda: sys.stdout.write("x"),  # in the buffer until the end
    "much": lambda: sys.stdout.write("x" * 10**6),
    "rich": print_with_rich,
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_closed_output_ends_a_command_quietly(close_output, capsys, action):
    close_output()
    assert run(doing(ACTIONS[action]), "go") == 141
    assert capsys.readouterr().err == ""


def test_help_and_a_bundles_description(close_output, capsys, tmp_path):
    write(tmp_path, MANIFEST.to_json())
    for cli, args in ((runtime_cli, ["--help"]), (main, ["inspect", tmp_path])):
        close_output()
        assert run(cli, *args) == 141
    assert capsys.readouterr().err == ""


def test_a_mistake_is_still_one(close_output, capsys):
    close_output()
    assert run(runtime_cli, "generat") == 2
    assert "did you mean 'generate'" in capsys.readouterr().err


def test_another_broken_pipe_is_a_defect(capsys):
    def broken():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(RuntimeError, match="a pipe that is not the output broke"):
        doing(broken)(["go"])


def test_generate_into_a_closed_pipe(demo_bundle):
    read, broken = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "specexport_runtime", "generate", str(demo_bundle), "def f(", "--stats"]
    try:
        done = subprocess.run(
            [*command, "--max-tokens", "8", "--threads", "1", "--no-spin"], stdout=broken, stderr=subprocess.PIPE,
            timeout=600, check=False,
        )  # fmt: skip
    finally:
        os.close(broken)
    assert (done.returncode, done.stderr) == (141, b"")


def test_streams_that_were_closed_are_empty_and_unread(monkeypatch):
    """As by ``<&-`` and ``>&-``: Python has None for them."""

    def go():
        assert sys.stdin.read() == ""
        assert not sys.stdout.isatty()
        click.echo("x")

    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    assert run(doing(go), "go") == 0
    sys.stdin.close()
    sys.stdout.close()
