"""A picture of the rows. Needs matplotlib, which is imported when something is drawn."""

import importlib.util
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.atomic import write_file
from specexport.simulate.report import Row
from specexport_runtime.errors import MissingDependencyError, UserInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before the work starts.

    Raises MissingDependencyError without matplotlib, UserInputError if the file's ending is not one of :data:`FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserInputError(f"{path} has an unknown image format.", f"end the name with {', '.join(FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("A plot needs matplotlib.", "pip install 'specexport[bench]'")


def write_plot(path: Path, rows: Seq[Row]) -> None:
    """Draw padding ratio and speedup over the batch size, one line an accuracy.

    Lines are exact, dots with bars are simulated and their 95 % intervals. Raises as :func:`check_plot` does, and
    UserInputError if the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, accuracy in enumerate(dict.fromkeys(row.accuracy for row in rows)):
        of_one = sorted((row for row in rows if row.accuracy == accuracy), key=lambda row: row.batch_size)
        _draw_padding(left, of_one, f"C{index}")
        _draw_speedup(right, of_one, f"C{index}")
    left.set_ylabel("padding ratio")
    right.set_ylabel("speedup over plain decoding")
    right.axhline(1.0, color="0.6", linewidth=0.8)
    right.plot([], [], "k-", label="unpadded")
    right.plot([], [], "k:", label="padded")
    ticks = sorted({row.batch_size for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)
        axes.legend()
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _draw_padding(axes: "Axes", rows: Seq[Row], color: str) -> None:
    batches = [row.batch_size for row in rows]
    axes.plot(batches, [row.exact.ratio for row in rows], color=color, label=f"accuracy {rows[0].accuracy:g}")
    axes.errorbar(
        batches,
        [row.simulated.ratio.mean for row in rows],
        yerr=[1.96 * (row.simulated.ratio.standard_error or 0.0) for row in rows],
        fmt="o", markersize=3, color=color,
    )  # fmt: skip


def _draw_speedup(axes: "Axes", rows: Seq[Row], color: str) -> None:
    batches = [row.batch_size for row in rows]
    axes.plot(batches, [row.speedup.unpadded for row in rows], "-", color=color)
    axes.plot(batches, [row.speedup.padded for row in rows], ":", color=color)
