"""Names of earlier releases: the message says why one does nothing any more, or what took its place."""

import sys
from collections.abc import Callable
from typing import Any

import click

from specexport_runtime.errors import UserInputError


def deprecated_option(names: str, why: str) -> Callable[[Any], Any]:
    """A switch that no help shows and that is done in any case now: a person is warned, a script is not."""

    def warn(_ctx: click.Context, param: click.Parameter, value: bool | None) -> None:
        if value is not None and sys.stderr.isatty():
            given = (param.opts if value else param.secondary_opts)[0]
            click.echo(f"warning: {given} changes nothing any more ({why}): leave it out.", err=True)

    return click.option(names, default=None, hidden=True, expose_value=False, callback=warn)


def removed_command_error(command: str, successor: str) -> UserInputError:
    """The error for a command that another one does the work of now."""
    return UserInputError(f"there is no command {command!r} any more.", f"use `{successor}`.")
