"""``specexport simulate``: what padding costs a batch and what speculation gains, without any model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from specexport.bench.command import comma_separated
from specexport.report import PRINTED, json_option, save_json

_FROM_0 = click.IntRange(min=0)
_FILE = click.Path(path_type=Path, dir_okay=False)
_Row = dict[str, Any]  # of the JSON file: one accuracy at one batch size


@click.command()
@click.option("--accuracy", "accuracies", metavar="A,…", default="0.5,0.7,0.8,0.9", show_default=True,
              callback=comma_separated(float, "numbers"), help="Probability that a draft token is right.")  # fmt: skip
@click.option("--batch-size", "batch_sizes", metavar="B,…", default="1,2,4,8,16", show_default=True,
              callback=comma_separated(int, "whole numbers"), help="Sequences in a batch.")  # fmt: skip
@click.option("--draft-length", type=int, default=7, show_default=True, help="Draft tokens a round (K).")
@click.option("--hit-rate", type=float, default=1.0, show_default=True, help="Probability that a draft is found.")
@click.option("--concentration", type=float, help="Draw accuracies from Beta(A·C, (1-A)·C).  [default: all have A]")
@click.option("--cost-ratio", type=float, default=0.0, show_default=True, help="A draft step over a target step (c).")
@click.option("--token-cost", type=float, default=0.0, show_default=True,
              help="One more token in a target step over the step's fixed cost.")  # fmt: skip
@click.option("--max-draft-length", type=int, default=16, show_default=True, help="Largest K tried for `best K`.")
@click.option("--samples", type=int, default=10000, show_default=True, help="Simulated rounds of each row.")
@click.option("--max-new-tokens", type=int, help="Also simulate whole generations of this length.")
@click.option("--prompt-tokens", type=_FROM_0, default=0, show_default=True, help="Tokens in a cache at the start.")
@click.option("--generations", type=int, default=100, show_default=True, help="Simulated generations of each row.")
@click.option("--seed", type=_FROM_0, default=0, show_default=True, help="Seed of the simulation.")
@json_option("Print parameters and rows, unrounded, as JSON and nothing else; with FILE write them there.")
@click.option("--plot", type=_FILE, help="Draw the rows there (.png, .svg or .pdf); needs matplotlib.")
def simulate(*, json_file: Path | None, plot: Path | None, **study: Any) -> None:
    """Expected padding and speedup of batched speculative decoding, exact and simulated.

    Every draft token is right with probability A, independently. Each row is one accuracy at one batch size.
    """
    from specexport.atomic import check_writable
    from specexport.plots import check_plot
    from specexport.simulate.model import check

    check_plot(plot)
    if json_file not in (None, PRINTED):
        check_writable(json_file)
    check(study["generations"] >= 1, f"The number of generations is {study['generations']}.")
    pairs = [(accuracy, batch_size) for accuracy in study["accuracies"] for batch_size in study["batch_sizes"]]
    rows = [compute_row(*pair, study, index) for index, pair in enumerate(pairs)]
    if json_file != PRINTED:
        click.echo(format_table(rows, study["max_draft_length"]))
        most = max(abs(row["deviations"] or 0.0) for row in rows)
        click.echo(f"\nSimulated and exact ratio differ by at most {most:.1f} standard errors.")
    if json_file is not None:
        study["cost"] = {name: study.pop(name) for name in ("cost_ratio", "token_cost")}
        save_json(json_file, {"schema": "specexport.simulate/1", "parameters": study, "rows": rows})
    if plot is not None:
        _draw(plot, rows)


def compute_row(accuracy: float, batch_size: int, study: _Row, index: int = 0) -> _Row:
    """One accuracy at one batch size, from the command's options; a value out of its range raises UserInputError."""
    from specexport.simulate import model

    beta = {name: study[name] for name in ("hit_rate", "concentration")}
    cost, longest = model.StepPrice(study["cost_ratio"], study["token_cost"]), study["max_draft_length"]
    drafts = model.Drafts(accuracy, study["draft_length"], **beta)
    exact = model.batch_padding(accuracy, batch_size, drafts.draft_length, **beta)
    rounds = model.simulate_rounds(drafts, batch_size, samples=study["samples"], seed=(study["seed"], index, 0))
    whole = {} if study["max_new_tokens"] is None else model.simulate_generations(
        drafts, batch_size, max_new_tokens=study["max_new_tokens"], prompt_tokens=study["prompt_tokens"],
        samples=study["generations"], seed=(study["seed"], index, 1),
    )  # fmt: skip
    priced: _Row = {"batch_size": batch_size, **beta}
    return {
        "accuracy": accuracy,
        "batch_size": batch_size,
        "exact": exact._asdict() | {"ratio": exact.ratio},
        "simulated": {name: estimate._asdict() for name, estimate in rounds.items()},
        "deviations": rounds["ratio"].deviations(exact.ratio),
        "speedup": model.expected_speedup(*drafts[:2], cost, **priced)._asdict(),
        "best_draft_length": model.best_draft_length(accuracy, cost, max_draft_length=longest, **priced),
        "generation": {name: estimate._asdict() for name, estimate in whole.items()} or None,
    }


def format_table(rows: Sequence[_Row], max_draft_length: int) -> str:
    """The rows as a Markdown table; a best K of ``max_draft_length`` is shown as a lower limit."""
    from specexport.report import Column, markdown_table

    whole, speedups = bool(rows[0]["generation"]), [row["speedup"] for row in rows]
    columns: list[Column[_Row]] = [
        Column("accuracy", lambda row: row["accuracy"], "g"),
        Column("batch", lambda row: row["batch_size"]),
        Column("accepted", lambda row: row["exact"]["accepted"], ".3f"),
        Column("longest", lambda row: row["exact"]["longest"], ".3f"),
        Column("padding", lambda row: row["exact"]["padding"], ".3f"),
        Column("ratio", lambda row: row["exact"]["ratio"], ".1%"),
        Column("ratio, simulated", lambda row: _percent(row["simulated"]["ratio"])),
        Column("speedup", lambda row: row["speedup"]["unpadded"], ".2f"),
        Column("padded", lambda row: row["speedup"]["padded"], ".2f",
               shown=any(each["padded"] != each["unpadded"] for each in speedups)),
        Column("best K", lambda row: row["best_draft_length"] if row["best_draft_length"] != max_draft_length
               else f"≥ {max_draft_length}"),
        Column("rounds", lambda row: row["generation"]["rounds"]["mean"], ".1f", shown=whole),
        Column("ratio, whole", lambda row: _percent(row["generation"]["ratio"]), shown=whole),
        Column("idle", lambda row: row["generation"]["idle"]["mean"], ".1%", shown=whole),
        Column("cache", lambda row: row["generation"]["cache_slots"]["mean"], ".2f", shown=whole),
    ]  # fmt: skip
    return markdown_table(columns, rows)


def _percent(estimate: _Row) -> str:
    error = "" if estimate["standard_error"] is None else f" ± {estimate['standard_error']:.1%}"
    return f"{estimate['mean']:.1%}{error}"


def _draw(path: Path, rows: Sequence[_Row]) -> None:
    """Padding ratio and speedup over the batch size: lines are exact, bars are simulated 95 % intervals."""
    from specexport.plots import batch_axis, new_figure, save_figure, speedup_axis

    figure, (left, right) = new_figure(2, width=10)
    for index, accuracy in enumerate(dict.fromkeys(row["accuracy"] for row in rows)):
        of_one = sorted((row for row in rows if row["accuracy"] == accuracy), key=lambda row: row["batch_size"])
        batches, color = [row["batch_size"] for row in of_one], f"C{index}"
        left.plot(batches, [row["exact"]["ratio"] for row in of_one], color=color, label=f"accuracy {accuracy:g}")
        simulated = [row["simulated"]["ratio"] for row in of_one]
        bars = [1.96 * (each["standard_error"] or 0.0) for each in simulated]
        left.errorbar(batches, [each["mean"] for each in simulated], yerr=bars, fmt="o", markersize=3, color=color)
        for name, stroke in (("unpadded", "-"), ("padded", ":")):
            right.plot(batches, [row["speedup"][name] for row in of_one], stroke, color=color)
    right.plot([], [], "k-", label="unpadded")
    right.plot([], [], "k:", label="padded")
    left.set_ylabel("padding ratio")
    speedup_axis(right)
    batch_axis([left, right], (row["batch_size"] for row in rows))
    for axes in (left, right):
        axes.legend()
    save_figure(figure, path)
