"""A picture of how a head's acceptance grew. Needs matplotlib, which is imported when it is drawn."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from specexport.plots import new_figure, save_figure


def plot_curve(curve: Seq[dict[str, Any]], path: Path) -> None:
    """Draw tokens a round on held-out texts against batches; ``curve`` is ``Trained.curve``.

    The ending of ``path`` decides the picture's format. UserInputError: the file cannot be written.
    """
    figure, (axes,) = new_figure(1, width=6)
    axes.plot([point["batch"] for point in curve], [point["length"] for point in curve], marker="o", markersize=3)
    axes.set_xlabel("batches learned from")
    axes.set_ylabel("tokens a round on held-out texts")
    axes.set_ylim(bottom=1)
    save_figure(figure, path)
