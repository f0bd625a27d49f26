"""How commands report: columns declared once, as Markdown or on the terminal; JSON on standard output."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from specexport.atomic import write_json, write_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

WIDTH = 160  # where the output is no terminal

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """What a table shows of each row."""

    name: str
    value: Callable[[Row], "str | Text | float | None"]  # None is shown as ``-``
    form: str = ""  # of a number, as in a format string
    unit: str = ""  # after a number
    left: bool = False  # text stands at the left, numbers at the right
    fold: bool = False  # takes the rest of a terminal's width, and breaks lines there
    shown: bool = True  # False leaves the column out

    def show(self, row: Row) -> "str | Text":
        """The cell of a row."""
        value = self.value(row)
        return format_number(value, self.form, self.unit) if value is None or isinstance(value, int | float) else value


def format_number(value: float | None, form: str, unit: str = "") -> str:
    """A number as ``form`` says, ``-`` where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def markdown_row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """A row for each of ``rows``, padded so that it can be read as it is."""
    written = []
    for column in columns:
        if not column.shown:
            continue
        texts = [column.name, *(str(column.show(row)) for row in rows)]
        width = max(2, *map(len, texts))
        pad, rule = (str.ljust, "-" * width) if column.left else (str.rjust, "-" * (width - 1) + ":")
        head, *rest = [pad(text, width) for text in texts]
        written.append([head, rule, *rest])
    return "\n".join(map(markdown_row, zip(*written, strict=True)))


def terminal_table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> "Table":
    """A row for each of ``rows``; cells are computed row by row."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    columns = [column for column in columns if column.shown]
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(
            column.name, justify="left" if column.left else "right", no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis", ratio=1 if column.fold else None,
        )  # fmt: skip
    for row in rows:
        cells = [column.show(row) for column in columns]
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def print_report(
    table: "Table | None",
    lines: Iterable[str],
    *,
    before: str = "",
    colour: bool | None = None,
    width: int | None = None,
) -> None:
    """A table between lines of text; a ``colour`` of None colours on a terminal, ``width`` bounds the table's."""
    from rich.console import Console

    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    console = Console(
        file=sys.stdout, width=min(most, width or most), highlight=False,
        force_terminal=True if colour else None, no_color=None if colour is None else not colour,
    )  # fmt: skip
    if before:
        console.print(before, markup=False, soft_wrap=True)
    if table is not None:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


PRINTED = Path("-")
"""The file of a ``--json`` without one: standard output."""


def json_option(text: str) -> Callable[[Any], Any]:
    """``--json`` of a command whose JSON may also go to a file, beside the report; its path, or ``PRINTED``."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(
        "--json", "json_file", type=kind, is_flag=False, flag_value=str(PRINTED), metavar="[FILE]", help=text
    )


def save_text(path: Path, text: str) -> None:
    """Print a text, or write it to a file in one step; UserInputError if that cannot be written."""
    if path == PRINTED:
        click.echo(text, nl=False)
    else:
        write_text(path, text)


def save_json(path: Path, record: Any) -> None:
    """Print a JSON object, or write it as ``write_json`` does."""
    if path == PRINTED:
        print_json(record)
    else:
        write_json(path, record)


def print_json(record: Any) -> None:
    """One JSON object on one line of standard output."""
    click.echo(json.dumps(record))
