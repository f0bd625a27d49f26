"""A picture of a tune profile. Needs matplotlib, which is imported when something is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

from specexport.atomic import write_file
from specexport_runtime.costs.tune_profile import TuneProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plot(path: Path, profile: TuneProfile) -> None:
    """Draw the speedup over plain decoding against K: a panel for each drafter, a line for each batch and context.

    The chosen K has a ring. Equal profiles give equal bytes.

    Raises:
        UserInputError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    drafters = list(dict.fromkeys(cell.drafter for cell in profile.cells))
    figure = Figure(figsize=(4.5 * len(drafters) + 2.5, 4), layout="constrained")
    panels = list(figure.subplots(1, len(drafters), squeeze=False, sharey=True)[0])
    for axes, drafter in zip(panels, drafters, strict=True):
        _draw(axes, profile, drafter)
    panels[0].set_ylabel("speedup over plain decoding")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, metadata=_metadata(path)))


def _metadata(path: Path) -> dict[str, None]:
    """What would name matplotlib's version or the time."""
    names = {".png": ("Software",), ".svg": ("Date",), ".pdf": ("Creator", "Producer", "CreationDate")}
    return dict.fromkeys(names.get(path.suffix.lower(), ()))


def _draw(axes: "Axes", profile: TuneProfile, drafter: str) -> None:
    for cell in (cell for cell in profile.cells if cell.drafter == drafter):
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
    axes.set_title(drafter)
    axes.set_xlabel("draft tokens a round (K)")
    axes.set_xticks(sorted({k for cell in profile.cells for k in cell.tokens_per_second}))
    axes.set_ylim(bottom=0)
