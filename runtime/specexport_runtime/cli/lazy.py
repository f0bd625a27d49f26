"""Commands that are imported when they are used: ``--help`` is quick, and no part imports an annex that it names."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from specexport_runtime.cli.errors import SuggestingGroup


class Mount(NamedTuple):
    """Where a command lives."""

    module: str  # imported when the command is used
    attribute: str  # a click command in it, or a group that has the command
    help: str  # one line for the list of commands


class LazyGroup(SuggestingGroup):
    """A group with a table of commands besides its own; a part that is not installed hides its commands only."""

    def __init__(self, *args: Any, mounts: Mapping[str, Mount], **more: Any) -> None:
        super().__init__(*args, **more)
        self._mounts = mounts

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Its own commands, then those of the table that are installed, in its order."""
        installed = [name for name, mount in self._mounts.items() if _is_installed(mount.module)]
        return [*super().list_commands(ctx), *installed]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        mount = self._mounts.get(cmd_name)
        if mount is None:
            return super().get_command(ctx, cmd_name)
        if not _is_installed(mount.module):
            return None
        command = getattr(importlib.import_module(mount.module), mount.attribute)
        if isinstance(command, click.Group):
            return command.get_command(ctx, cmd_name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands; those of the table without importing them."""
        names = self.list_commands(ctx)
        texts = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, texts.get(name) or self._mounts[name].help) for name in names])


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's package is missing
        return False
