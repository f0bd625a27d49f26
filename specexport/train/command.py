"""``specexport train-draft``: flags in, a draft out. Everything heavy is imported when it runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command("train-draft")
@click.argument("target")
@click.option("-o", "--output", type=_FOLDER, required=True, help="Folder of the draft.")
@click.option("--prompts", type=_FILE, multiple=True, help="JSONL with a field `prompt`. Repeatable.")
@click.option("--kind", default="eagle3", show_default=True, help="What to train: eagle3 or mtp, or pruned.")
@click.option("--work", type=_FOLDER, help="Folder for texts, hidden states and the state.  [default: OUTPUT.work]")
@click.option("--bundle", type=_FOLDER, help="A bundle of the target that writes the texts.  [default: one is built]")
@click.option("--max-tokens", type=int, default=192, show_default=True, help="New tokens for each prompt.")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="Of every second group of texts.")
@click.option("--draft-vocab-size", type=int, metavar="N", help="Tokens of a head's LM head.  [default: 16384, or all]")
@click.option("--keep-layers", type=int, metavar="N", help="Layers of a pruned draft.  [default: a quarter, or 2]")
@click.option("--steps", type=int, help="Draft steps of a head's training-time test.  [default: 3]")
@click.option("--epochs", type=int, default=4, show_default=True, help="How often it reads each text.")
@click.option("--batches", type=int, help="Batches to learn from, in the place of --epochs.")
@click.option("--batch-tokens", type=int, default=2048, show_default=True, help="Most tokens of a batch.")
@click.option("--max-states-gb", type=float, default=8.0, show_default=True, help="Most disk for hidden states.")
@click.option("--rate", type=float, default=0.003, show_default=True, help="Learning rate of the matrices.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option("--threads", type=int, help="Compute threads.  [default: the cores available]")
@click.option("--hours", type=float, help="End after so long; the same command goes on.  [default: run to the end]")
@click.option("--plot", type=_FILE, help="Draw the acceptance there (.png, .svg or .pdf); needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def train_draft(*, plot: Path | None, as_json: bool, quiet: bool, **asked: Any) -> None:
    """Train a draft for TARGET, on texts that it writes to your prompts.

    Of kind eagle3 or mtp it is a head, which reads the target's hidden states; of kind pruned it is a model of some of
    the target's own layers, which runs wherever models do.

    A run that was ended goes on where it was, by --hours or otherwise: give the same command again.
    """
    from specexport.compile.model import require_export_stack
    from specexport.plots import check_plot
    from specexport.progress import show_progress
    from specexport.report import print_json
    from specexport.train.options import TrainOptions
    from specexport.train.run import train_draft as run
    from specexport.train.work import Paused

    options = TrainOptions(**asked)
    require_export_stack()
    check_plot(plot)
    try:
        with show_progress(sys.stderr, quiet=quiet) as progress:
            result = run(options, progress)
    except Paused as paused:
        if as_json:
            print_json({"finished": False, **vars(paused)})
        else:
            click.echo(f"The time is up: {paused}, saved in {options.work_folder}. The same command goes on.")
        return
    if plot is not None:
        plot_curve(result.curve, plot)
    if as_json:
        print_json(result.to_json())
        return
    last = result.curve[-1]
    click.echo(
        f"Trained {result.output} on {result.num_tokens:,} tokens in {result.seconds / 60:.1f} minutes "
        f"({result.tokens_per_second:.0f} tokens/s), peak memory {result.peak_memory_bytes / 1e6:.0f} MB."
    )
    click.echo(f"  held-out texts: {last['length']:.2f} tokens a round, first guess right {last['rates'][0]:.0%}")
    click.echo(f"  specexport build {options.target} {result.flag} {result.output} -o BUNDLE")


def plot_curve(curve: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens a round on held-out texts against batches; ``curve`` is ``Trained.curve``."""
    from specexport.plots import new_figure, save_figure

    figure, (axes,) = new_figure(1, width=6)
    axes.plot([point["batch"] for point in curve], [point["length"] for point in curve], marker="o", markersize=3)
    axes.set_xlabel("batches learned from")
    axes.set_ylabel("tokens a round on held-out texts")
    axes.set_ylim(bottom=1)
    save_figure(figure, path)
