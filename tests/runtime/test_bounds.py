"""Numbers that no machine can honour are refused by every command, before anything long begins."""

import os

import pytest
from click.testing import CliRunner

from specexport.cli import main
from specexport_runtime.machine import most_threads
from tests.support.cases.manifests import MANIFEST, write
from tests.support.cases.refusals import line_of

COMMANDS = {
    "generate": ["text"],
    "explain": ["text"],
    "serve": ["--port", "0"],
    "bench": ["--quiet"],
    "verify": ["--quiet"],
}


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
@pytest.mark.parametrize("count", [0, -1, 100_000, 10**30])
def test_threads_are_bounded(refuse, command, count):
    line = refuse(command, "--threads", count)
    assert line == f"error: --threads is {count}. Fix: give 1 to {most_threads()}, or leave it out."


def test_the_bound_of_threads_grows_with_the_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert most_threads() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    assert most_threads() == 768


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("count", [0, -1, 4097, 100_000_000])
def test_sequences_at_a_time_are_bounded(refuse, command, count):
    """However few prompts there are."""
    line = refuse(command, "--max-num-seqs", count)
    assert f"is {count}." in line
    assert "from 1 to 4096" in line


def test_batches_are_bounded(refuse):
    said = refuse("bench", "--batch-size", "1,100000000")
    assert "a batch size is 100000000. Fix: choose a number from 1 to 4096." in said
