"""Numbers that no machine can honour are refused by every command, before anything long begins."""

import os

import pytest
from click.testing import CliRunner

from specexport.cli import main
from specexport_runtime.machine import max_thread_count
from tests.support.cases.manifests import MANIFEST, write
from tests.support.cases.refusals import line_of

COMMANDS = {
    "generate": ["text"], "explain": ["text"], "serve": ["--port", "0"], "bench": ["--quiet"], "verify": ["--quiet"],
}  # fmt: skip


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """Run a command on a bundle that has a manifest and nothing else; the one line that it ends with."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MANIFEST.to_json())

    def run(name, *options):
        bundle = [] if name == "demo" else [str(tmp_path)]
        return line_of(CliRunner().invoke(main, [name, *bundle, *COMMANDS.get(name, ()), *map(str, options)]))

    return run


@pytest.mark.parametrize("command", [*COMMANDS, "demo"])
@pytest.mark.parametrize("count", [0, 100_000, 10**30])
def test_threads_are_bounded(refuse, command, count):
    line = refuse(command, "--threads", count)
    assert f"--threads is {count}" in line
    assert f"1 to {max_thread_count()}" in line


def test_the_bound_of_threads_grows_with_the_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert max_thread_count() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    assert max_thread_count() == 768


@pytest.mark.parametrize(
    ("command", "option", "count"),
    [
        *(("generate", "--max-num-seqs", count) for count in (0, -1, 4097, 100_000_000)),
        ("serve", "--max-num-seqs", 4097),
        ("bench", "--batch-size", 100_000_000),
    ],
)
def test_sequences_at_a_time_are_bounded(refuse, command, option, count):
    """However few prompts there are."""
    line = refuse(command, option, count)
    assert f"is {count}." in line
    assert "from 1 to 4096" in line
