"""Tune tables, and the comparison of several, as tables on the terminal."""

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport.tune.compare import Pick, describe_pick
from specexport.tune.table import TuneCell, TuneTable
from specexport.tune.texts import TextCheck

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 160  # where the output is no terminal
_CAPTION = (
    "right: acceptance rate, tokens a round, milliseconds of a draft and of a verify step; of the best K that drafts"
)


def print_tables(tables: Mapping[str, TuneTable], checks: Mapping[str, TextCheck], pick: Pick | None) -> None:
    """Print a table for each bundle, whether the texts are plain decoding's, and which draft is the best.

    ``tables`` and ``checks`` are by the bundles' names; ``pick`` is None for a single bundle.
    """
    console = _open_console()
    for name, table in tables.items():
        console.print(make_table(table.cells, name))
    if pick is not None:
        console.print(make_draft_table(tables, pick))
        console.print(make_pick_table(pick))
    for line in [describe_texts(checks), *([] if pick is None else [describe_pick(pick)])]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _open_console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH)


def _new_table(title: str, names: Seq[str], numbers: Seq[str], caption: str | None = None) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=escape(title), caption=caption)
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def make_table(cells: Seq[TuneCell], name: str) -> "Table":
    """Tokens/s of every K, the chosen one, its speedup over plain decoding, and what the rounds were like."""
    tried = sorted({k for cell in cells for k in cell.tokens_per_second})
    rates = [f"K={k}" if k else "plain" for k in tried]
    rounds = ["acceptance", "tokens/round", "draft ms", "verify ms"]
    title = f"{name}: tokens/s by draft tokens a round (K)"
    table = _new_table(title, ["drafter"], ["batch", "context", *rates, "best K", "speedup", *rounds], _CAPTION)
    for cell in cells:
        table.add_row(
            cell.drafter, str(cell.batch_size), str(cell.context), *(_show_rate(cell, k) for k in tried),
            str(cell.lookahead) if cell.lookahead else "0 (plain)", f"{cell.speedup:.2f}×", *_show_rounds(cell),
        )  # fmt: skip
    return table


def _show_rate(cell: TuneCell, lookahead: int) -> str:
    rate = cell.tokens_per_second.get(lookahead)
    text = "-" if rate is None else f"{rate:.1f}"
    return f"[bold green]{text}[/]" if lookahead == cell.lookahead else text


def _show_rounds(cell: TuneCell) -> list[str]:
    """What the rounds were like with the fastest K that drafts: also where plain decoding is faster, it says why."""
    fastest = max((k for k in cell.rounds if k), key=lambda k: cell.tokens_per_second[k], default=None)
    if fastest is None:
        return ["-"] * 4
    forms = (".3f", ".2f", ".2f", ".2f")
    values = cell.rounds[cell.lookahead or fastest]
    return ["-" if value is None else f"{value:{form}}" for value, form in zip(values, forms, strict=True)]


def make_draft_table(tables: Mapping[str, TuneTable], pick: Pick) -> "Table":
    """What each draft is, and its speedup over all circumstances."""
    from rich.markup import escape

    table = _new_table("drafts", ["bundle", "draft", "weights"], ["layers", "LM head", "size", "speedup"])
    for name, found in tables.items():
        draft = found.settings["draft"]
        rows, vocab_size = draft["head_size"], draft["vocab_size"]
        table.add_row(
            escape(name), escape(draft["source"]), draft["quantize"] or draft["dtype"], str(draft["num_layers"]),
            f"{rows}" if rows == vocab_size else f"{rows} of {vocab_size}",
            f"{draft['engine_bytes'] / 1e6:.1f} MB", f"{pick.speedups[name]:.2f}×",
            style="bold green" if name == pick.bundle else None,
        )  # fmt: skip
    return table


def make_pick_table(pick: Pick) -> "Table":
    """The best draft of each batch size and context."""
    from rich.markup import escape

    table = _new_table("fastest draft", [], ["batch", "context", "bundle", "K", "tokens/s", "speedup"])
    for cell in pick.cells:
        table.add_row(
            str(cell.batch_size), str(cell.context), escape(cell.bundle or "plain"), str(cell.lookahead),
            f"{cell.tokens_per_second:.1f}", f"{cell.speedup:.2f}×",
        )  # fmt: skip
    return table


def describe_texts(checks: Mapping[str, TextCheck]) -> str:
    """How many texts were equal to plain decoding's."""
    compared = sum(check.compared for check in checks.values())
    different = sum(check.different for check in checks.values())
    return f"Texts equal to plain greedy decoding: {compared - different} of {compared}."


def describe_differences(checks: Mapping[str, TextCheck]) -> list[str]:
    """A warning for each bundle with texts that differ."""
    return [
        f"warning: {check.different} of {check.compared} texts of {name} differ from plain greedy decoding, the first "
        f"{check.first}. Fix: run `specexport verify` on the bundle to see the logit gap there."
        for name, check in checks.items()
        if check.different
    ]
