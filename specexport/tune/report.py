"""A tune profile as a table on the terminal."""

import sys
from typing import TYPE_CHECKING

from specexport_runtime.costs.tune_profile import TuneCell, TuneProfile

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160  # where the output is no terminal


def print_profile(profile: TuneProfile) -> None:
    """Print the table: tokens/s of every K, the chosen one, and its speedup over plain decoding."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    console.print(make_table(profile))


def make_table(profile: TuneProfile) -> "Table":
    """One row for each drafter, batch size and context."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tried = sorted({k for cell in profile.cells for k in cell.tokens_per_second})
    table = Table(box=SIMPLE_HEAD, title=f"{profile.bundle}: tokens/s by draft tokens a round (K)")
    table.add_column("drafter")
    for name in ("batch", "context", *(f"K={k}" if k else "plain" for k in tried), "best K", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in profile.cells:
        rates = [_show(cell, k) for k in tried]
        speedup = cell.tokens_per_second[cell.lookahead] / cell.tokens_per_second[0]
        best = str(cell.lookahead) if cell.lookahead else "0 (plain)"
        table.add_row(cell.drafter, str(cell.batch_size), str(cell.context), *rates, best, f"{speedup:.2f}×")
    return table


def _show(cell: TuneCell, lookahead: int) -> str:
    rate = cell.tokens_per_second.get(lookahead)
    text = "-" if rate is None else f"{rate:.1f}"
    return f"[bold green]{text}[/]" if lookahead == cell.lookahead else text
