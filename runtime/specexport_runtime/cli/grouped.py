"""Help of commands with many options: what people want first comes first, the rest stands under headings."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

_FIRST, RARE = "Options", "Rare"


def add_under_heading(heading: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add options to a command, under a heading of its help unless they have one already."""

    def add(command: Any) -> Any:
        before = len(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__[before:]:
            param.__dict__.setdefault("heading", heading)
        return command

    return add


class GroupedCommand(click.Command):
    """A command whose help has the options named in ``first``, then the others by heading.

    ``renamed`` has flags of earlier releases, which still work, with their names of today.
    """

    def __init__(self, *args: Any, first: str = "", renamed: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.first, self.renamed = first.split(), renamed or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; a person who gives a renamed flag is told its name of today."""
        return super().parse_args(ctx, [self._replace_renamed_flag(arg) for arg in args])

    def _replace_renamed_flag(self, arg: str) -> str:
        flag, *value = arg.split("=", 1)
        if flag not in self.renamed:
            return arg
        if sys.stderr.isatty():
            click.echo(f"warning: {flag} is called {self.renamed[flag]} now.", err=True)
        return "=".join([self.renamed[flag], *value])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        params = {str(param.name): param for param in self.get_params(ctx)}
        ordered = [params.pop(name) for name in self.first]
        sections: dict[str, list[tuple[str, str]]] = {_FIRST: _get_help_records(ordered, ctx)}
        for param in params.values():
            heading = getattr(param, "heading", _FIRST)
            sections.setdefault(heading, []).extend(_get_help_records([param], ctx))
        for heading, records in sorted(sections.items(), key=lambda section: section[0] == RARE):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _get_help_records(params: Sequence[click.Parameter], ctx: click.Context) -> list[tuple[str, str]]:
    options = (param for param in params if isinstance(param, click.Option))
    return [record for option in options if (record := option.get_help_record(ctx)) is not None]
