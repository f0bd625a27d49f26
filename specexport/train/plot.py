"""A picture of how a head's acceptance grew. Needs matplotlib, which is imported when it is drawn."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from specexport.atomic import write_file


def plot_curve(curve: Seq[dict[str, Any]], path: Path) -> None:
    """Draw tokens a round on held-out texts against batches; ``curve`` is ``Trained.curve``.

    The ending of ``path`` decides the picture's format. UserInputError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([point["batch"] for point in curve], [point["length"] for point in curve], marker="o", markersize=3)
    axes.set_xlabel("batches learned from")
    axes.set_ylabel("tokens a round on held-out texts")
    axes.set_ylim(bottom=1)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150))
