"""Pictures of a benchmark. Needs matplotlib, which is imported when something is drawn.

====================  ==========================================================================================
``batch-size.png``    tokens/s and speedup against batch size (EMS-SD, Ni et al. 2025, figure 1)
``lookahead.png``     speedup, time for a token with its standard deviation over the texts, and efficiency against K
                      (Chen et al. 2023, figure 1)
``padding.png``       padding ratio against batch size
====================  ==========================================================================================

With several domains, contexts, temperatures or ways of batching, each has its own pictures.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specexport.bench.methods import AUTO
from specexport.bench.records import BenchResult
from specexport.bench.runner import describe_cell
from specexport.bench.summary import BenchSummary, Fastest, find_fastest, summarize
from specexport.plots import add_legend, batch_axis, check_plots, new_figure, save_figure, speedup_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"batch_size": "batch sizes", "num_speculative_tokens": "values of K"}

_Value = Callable[[BenchSummary], float | None]


class PlotOutcome(NamedTuple):
    """What became of the pictures."""

    written: list[Path]  # files
    skipped: list[str]  # one line for each picture that has nothing to show


def write_plots(folder: Path, result: BenchResult) -> PlotOutcome:
    """Draw every picture that has data into ``folder``; equal records give equal bytes. Errors as ``check_plots``."""
    check_plots(folder)
    written, skipped = [], []
    for suffix, rows in _groups(summarize(result)).items():
        drafted = [row for row in rows if row.cell.num_speculative_tokens]
        fixed = [row for row in drafted if row.cell.num_speculative_tokens != AUTO]
        for name, draw, shown, axis in (
            ("batch-size", _draw_batch_size, rows, "batch_size"),
            ("lookahead", _draw_lookahead, fixed, "num_speculative_tokens"),
            ("padding", _draw_padding, drafted, "batch_size"),
        ):
            file = f"{name}{suffix}.png"
            if not _is_swept(shown, axis):
                skipped.append(f"{file} skipped: no method was measured at two {_AXES[axis]}")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(draw(shown), folder / file)
            written.append(folder / file)
    return PlotOutcome(written, skipped)


def _groups(rows: Sequence[BenchSummary]) -> dict[str, list[BenchSummary]]:
    """Rows that one picture may show, by the end of its name, which says what varies between pictures."""
    described = [
        {
            "domain": row.cell.domain, "context": f"context{row.cell.context}",
            "temperature": f"t{row.cell.temperature:g}", "batching": row.cell.batching,
        }
        for row in rows
    ]  # fmt: skip
    varying = [name for name in next(iter(described), {}) if len({each[name] for each in described}) > 1]
    groups: dict[str, list[BenchSummary]] = {}
    for row, each in zip(rows, described, strict=True):
        suffix = "".join("-" + re.sub(r"[^\w.]+", "-", each[name]) for name in varying)
        groups.setdefault(suffix, []).append(row)
    return groups


def _is_swept(rows: Sequence[BenchSummary], axis: str) -> bool:
    """Whether any method has two values or more on an axis."""
    values: dict[str, set[int]] = {}
    for row in rows:
        values.setdefault(row.cell.label, set()).add(getattr(row.cell, axis))
    return any(len(each) > 1 for each in values.values())


def _lines(rows: Sequence[BenchSummary], *, over_batch: bool) -> dict[str, list[BenchSummary]]:
    """The rows of each line by its label: a method, and the K or the batch size if there are several."""
    lookaheads: dict[str, set[int]] = {}
    for row in rows:
        lookaheads.setdefault(row.cell.label, set()).add(row.cell.num_speculative_tokens)
    several = len({row.cell.batch_size for row in rows}) > 1
    lines: dict[str, list[BenchSummary]] = {}
    for row in rows:
        label = row.cell.label
        if over_batch and len(lookaheads[label]) > 1:
            label += f", K={row.cell.requested or 0}"
        if not over_batch and several:
            label += f", batch {row.cell.batch_size}"
        lines.setdefault(label, []).append(row)
    return lines


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    from cycler import cycler  # comes with matplotlib
    from matplotlib import rcParamsDefault

    figure, every = new_figure(panels)
    for axes in every:  # more lines than there are colours get another stroke
        axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * rcParamsDefault["axes.prop_cycle"])
    return figure, every


def _draw_batch_size(rows: Sequence[BenchSummary]) -> "Figure":
    figure, (left, right) = _figure(2)
    for label, line in _lines(rows, over_batch=True).items():
        _plot(left, line, label, lambda row: row.tokens_per_second)
        _plot(right, line, label, lambda row: row.speedup)
    left.set_ylabel("tokens/s")
    speedup_axis(right)
    batch_axis([left, right], (row.cell.batch_size for row in rows))
    add_legend(figure, left)
    return figure


def _draw_padding(rows: Sequence[BenchSummary]) -> "Figure":
    figure, (axes,) = _figure(1)
    for label, line in _lines(rows, over_batch=True).items():
        _plot(axes, line, label, lambda row: 100 * row.padding_ratio)
    axes.set_ylabel("padding ratio, %")
    batch_axis([axes], (row.cell.batch_size for row in rows))
    add_legend(figure, axes)
    return figure


def _draw_lookahead(rows: Sequence[BenchSummary]) -> "Figure":
    figure, (left, middle, right) = _figure(3)
    for label, line in _lines(rows, over_batch=False).items():
        ordered = sorted(line, key=lambda row: row.cell.num_speculative_tokens)
        counts = [row.cell.num_speculative_tokens for row in ordered]
        _plot(left, ordered, label, lambda row: row.speedup, over_batch=False)
        deviations = [row.latency_deviation for row in ordered]
        middle.errorbar(
            counts, [row.latency for row in ordered], yerr=deviations, label=label, marker="o", markersize=3, capsize=3
        )
        _plot(right, ordered, label, lambda row: row.efficiency, over_batch=False)
    speedup_axis(left)
    middle.set_ylabel("ms a token of a text, ± standard deviation")
    right.set_ylabel("efficiency: tokens / (draft tokens + 1)")
    for axes in (left, middle, right):
        axes.set_xticks(sorted({row.cell.num_speculative_tokens for row in rows}))
        axes.set_xlabel("draft tokens a round (K)")
        axes.set_ylim(bottom=0)
    add_legend(figure, left)
    return figure


def _plot(axes: "Axes", rows: Sequence[BenchSummary], label: str, value: _Value, *, over_batch: bool = True) -> None:
    points = [
        (row.cell.batch_size if over_batch else row.cell.num_speculative_tokens, found)
        for row in rows
        if (found := value(row)) is not None
    ]
    points.sort()
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=label)


def write_plot(path: Path, result: BenchResult) -> bool:
    """Draw each K's speedup, a panel a method and a line a place, the chosen K ringed; False if no K was swept."""
    panels: dict[str, list[Fastest]] = {}
    for each in find_fastest(summarize(result)):
        panels.setdefault(each.cell.label, []).append(each)
    if not panels:
        return False
    figure, every = new_figure(len(panels), share=True)
    for axes, (label, found) in zip(every, panels.items(), strict=True):
        for each in found:
            speedups = {k: rate / each.rates[0] for k, rate in each.rates.items()}
            place = describe_cell(each.cell).removeprefix(f"{label}, ")
            (line,) = axes.plot(list(speedups), list(speedups.values()), marker="o", markersize=3, label=place)
            axes.plot([each.lookahead], [each.speedup], "o", markersize=9, fillstyle="none", color=line.get_color())
        speedup_axis(axes)
        axes.set_title(label)
        axes.set_xlabel("draft tokens a round (K)")
        axes.set_xticks(sorted({k for each in found for k in each.rows}))
        axes.set_ylim(bottom=0)
    add_legend(figure, every[0])
    save_figure(figure, path)
    return True
