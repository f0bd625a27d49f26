"""``specexport simulate``: what padding costs a batch and what speculation gains, without any model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path, dir_okay=False)


def _comma_list(convert: Callable[[str], Any], what: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    def parse(_ctx: click.Context, _param: click.Parameter, value: str) -> list[Any]:
        try:
            return [convert(part) for part in value.split(",")]
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of {what} with commas between them.") from None

    return parse


@click.command()
@click.option("--accuracy", metavar="A,…", default="0.5,0.7,0.8,0.9", show_default=True,
              callback=_comma_list(float, "numbers"), help="Probability that a draft token is right.")  # fmt: skip
@click.option("--batch-size", metavar="B,…", default="1,2,4,8,16", show_default=True,
              callback=_comma_list(int, "whole numbers"), help="Sequences in a batch.")  # fmt: skip
@click.option("--draft-length", type=int, default=7, show_default=True, help="Draft tokens a round (K).")
@click.option("--hit-rate", type=float, default=1.0, show_default=True, help="Probability that a draft is found.")
@click.option("--concentration", type=float,
              help="Each sequence draws its accuracy from Beta(A·C, (1-A)·C).  [default: all have A]")  # fmt: skip
@click.option("--cost-ratio", type=float, default=0.0, show_default=True, help="A draft step over a target step (c).")
@click.option("--token-cost", type=float, default=0.0, show_default=True,
              help="One more token in a target step over the step's fixed cost.")  # fmt: skip
@click.option("--max-draft-length", type=int, default=16, show_default=True, help="Largest K tried for `best K`.")
@click.option("--samples", type=int, default=10000, show_default=True, help="Simulated rounds of each row.")
@click.option("--max-new-tokens", type=int, help="Also simulate whole generations of this length.")
@click.option("--prompt-tokens", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens in each cache when a generation starts.")  # fmt: skip
@click.option("--generations", type=int, default=100, show_default=True, help="Simulated generations of each row.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the simulation.")
@click.option("--json", "json_file", type=_FILE, help="Write parameters and rows there, unrounded.")
@click.option("--plot", type=_FILE, help="Draw the rows there (.png, .svg or .pdf); needs matplotlib.")
def simulate(
    *,
    accuracy: list[float],
    batch_size: list[int],
    cost_ratio: float,
    token_cost: float,
    json_file: Path | None,
    plot: Path | None,
    **rest: Any,
) -> None:
    """Expected padding and speedup of batched speculative decoding, exact and simulated.

    Every draft token is right with probability A, independently. Each row is one accuracy at one batch size.
    """
    from specexport.atomic import check_writable
    from specexport.simulate.closed_form import StepCost
    from specexport.simulate.plot import check_plot, write_plot
    from specexport.simulate.report import (
        Study,
        compute_rows,
        format_table,
        largest_deviation,
        write_record,
    )

    if plot is not None:
        check_plot(plot)
    for path in (json_file, plot):
        if path is not None:
            check_writable(path)
    study = Study(accuracies=accuracy, batch_sizes=batch_size, cost=StepCost(cost_ratio, token_cost), **rest)
    rows = compute_rows(study)
    click.echo(format_table(rows, study.max_draft_length))
    click.echo(f"\nSimulated and exact ratio differ by at most {largest_deviation(rows):.1f} standard errors.")
    if json_file is not None:
        write_record(json_file, study, rows)
    if plot is not None:
        write_plot(plot, rows)
