"""How tables are written: in Markdown, and on the terminal."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 160  # where the output is no terminal

Row = TypeVar("Row")


def make_console(colour: bool | None = None) -> "Console":
    """A console on standard output; a ``colour`` of None colours on a terminal."""
    from rich.console import Console

    return Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, highlight=False,
        force_terminal=True if colour else None, no_color=None if colour is None else not colour,
    )  # fmt: skip


def format_number(value: float | None, form: str, unit: str = "") -> str:
    """A number as ``form`` says, ``-`` where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def markdown_table(columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row], *, left: int = 0) -> str:
    """A row for each of ``rows``, with what each column shows of it; all but the ``left`` first are of numbers."""
    written = []
    for i, (name, show) in enumerate(columns.items()):
        texts = [name, *map(show, rows)]
        width = max(2, *map(len, texts))
        pad, rule = (str.ljust, "-" * width) if i < left else (str.rjust, "-" * (width - 1) + ":")
        head, *rest = [pad(text, width) for text in texts]
        written.append([head, rule, *rest])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*written, strict=True))
