"""A picture of tune tables. Needs matplotlib, which is imported when something is drawn."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.atomic import write_file
from specexport.tune.table import TuneCell, TuneTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plot(path: Path, tables: Mapping[str, TuneTable]) -> None:
    """Draw the speedup over plain decoding against K: a line for each batch size and context.

    Each drafter of each bundle (``tables`` has their names) has a panel. The chosen K has a ring. Equal tables give
    equal bytes. Raises UserInputError if the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    drawn: dict[str, list[TuneCell]] = {}
    for name, table in tables.items():
        for cell in table.cells:
            title = f"{name}: {cell.drafter}" if len(tables) > 1 else cell.drafter
            drawn.setdefault(title, []).append(cell)
    figure = Figure(figsize=(4.5 * len(drawn) + 2.5, 4), layout="constrained")
    panels = list(figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0])
    for axes, (title, cells) in zip(panels, drawn.items(), strict=True):
        _draw(axes, title, cells)
    panels[0].set_ylabel("speedup over plain decoding")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, metadata=_metadata(path)))


def _metadata(path: Path) -> dict[str, None]:
    """What would name matplotlib's version or the time."""
    names = {".png": ("Software",), ".svg": ("Date",), ".pdf": ("Creator", "Producer", "CreationDate")}
    return dict.fromkeys(names.get(path.suffix.lower(), ()))


def _draw(axes: "Axes", title: str, cells: Seq[TuneCell]) -> None:
    for cell in cells:
        tried = sorted(cell.tokens_per_second)
        speedups = {k: cell.tokens_per_second[k] / cell.tokens_per_second[0] for k in tried}
        (line,) = axes.plot(
            tried, list(speedups.values()), marker="o", markersize=3,
            label=f"batch {cell.batch_size}, context {cell.context}",
        )  # fmt: skip
        axes.plot(
            [cell.lookahead], [speedups[cell.lookahead]], "o", markersize=9, fillstyle="none", color=line.get_color()
        )
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_title(title)
    axes.set_xlabel("draft tokens a round (K)")
    axes.set_xticks(sorted({k for cell in cells for k in cell.tokens_per_second}))
    axes.set_ylim(bottom=0)
