"""What all pictures share. Needs matplotlib, which is imported when something is drawn."""

import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.atomic import check_writable, write_file
from specexport_runtime.errors import MissingDependencyError, UserInputError, make_install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".png": ("Software",), ".svg": ("Date",), ".pdf": ("Creator", "Producer", "CreationDate")}
"""Endings of a picture's name, with the metadata that would name matplotlib's version or the time."""


def check_matplotlib() -> None:
    """MissingDependencyError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("Plots need matplotlib.", make_install_hint("bench"))


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn (UserInputError), before the work starts; None passes."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise UserInputError(f"{path} has an unknown image format.", f"end the name with {', '.join(FORMATS)}.")
    check_matplotlib()
    check_writable(path)


def check_plots(folder: Path) -> None:
    """Refuse a folder that no pictures can be drawn into (UserInputError), before the work starts."""
    check_matplotlib()
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserInputError(f"{folder} cannot be a folder for plots: {place} is in the way.", "choose another place.")


def new_figure(panels: int, *, width: float | None = None, share: bool = False) -> "tuple[Figure, list[Axes]]":
    """A figure with its panels in a row, which ``share`` one scale; ``width`` None leaves room for a legend."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(width or 4.5 * panels + 2.5, 4), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=share)[0])


def add_legend(figure: "Figure", axes: "Axes") -> None:
    """One legend for all panels, beside them: their lines are the same."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")


def speedup_axis(axes: "Axes") -> None:
    """Speedups from below, with a line where plain decoding is."""
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_ylabel("speedup over plain decoding")


def batch_axis(panels: "Sequence[Axes]", sizes: Iterable[int]) -> None:
    """Batch sizes along the bottom, in powers of two."""
    ticks = sorted(set(sizes))
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture; equal ones have equal bytes. UserInputError if the file cannot be written."""
    metadata = dict.fromkeys(FORMATS[path.suffix.lower()])
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, metadata=metadata))
