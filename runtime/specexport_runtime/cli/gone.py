"""Options of earlier releases: whoever still gives one is told what took its place."""

from collections.abc import Callable
from typing import Any

import click


def gone(names: str, instead: str) -> Callable[[Any], Any]:
    """An option that no help shows and that refuses to be given.

    Args:
        names: as for ``click.option``, of a switch: ``"--a/--no-a"``.
        instead: what took its place.
    """

    def refuse(_ctx: click.Context, param: click.Parameter, value: bool | None) -> None:
        if value is not None:
            given = (param.opts if value else param.secondary_opts)[0]
            raise click.UsageError(f"there is no {given} any more: {instead}; leave it out.")

    return click.option(names, default=None, hidden=True, expose_value=False, callback=refuse)
