"""The tables of commands: they name annexes as text, and a part that is not there takes its command with it alone."""

import click
from click.testing import CliRunner

from specexport_runtime.cli.lazy import LazyGroup, Mount

MOUNTS = {
    "serve": Mount("specexport_runtime.cli.serve", "serve", "Serve."),
    "gone": Mount("specexport_runtime.no_annex.command", "gone", "Never shown."),
}


@click.group(cls=LazyGroup, mounts=MOUNTS)
def group() -> None:
    pass


@group.command()
def own() -> None:
    """Do it here."""


def test_commands_are_listed_from_the_table_and_what_is_not_installed_is_hidden() -> None:
    text = CliRunner().invoke(group, ["--help"]).stdout
    assert [line.split() for line in text.partition("Commands:\n")[2].splitlines()] == [
        ["own", "Do", "it", "here."],
        ["serve", "Serve."],
    ]


def test_a_command_that_is_not_installed_is_unknown_and_the_others_run() -> None:
    result = CliRunner().invoke(group, ["gone"])
    assert result.exit_code == 2
    assert "gone" in result.stderr
    assert CliRunner().invoke(group, ["own"]).exit_code == 0
    assert "--max-waiting" in CliRunner().invoke(group, ["serve", "--help"]).stdout
