"""``specexport tune``: parse what is asked, measure, print the tables. Everything heavy is imported when it runs."""

import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.bench.command import list_of

if TYPE_CHECKING:
    from specexport.bench.subject import Subject
    from specexport.tune.options import TuneOptions

_FILE = click.Path(path_type=Path, dir_okay=False)
_WHOLE = list_of(int, "whole numbers")


@click.command()
@click.argument("bundles", metavar="BUNDLE…", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--prompts", "files", type=_FILE, multiple=True, required=True, help="JSONL with a field `prompt`. Repeatable."
)
@click.option(
    "--drafter",
    "drafters",
    metavar="NAME",
    multiple=True,
    help="draft-model, head, lookup or self. Repeatable.  [default: all that the bundle has; of several, their own]",
)
@click.option("--batch-sizes", metavar="B,…", callback=_WHOLE, help="Sequences decoded at a time.  [default: 1,4,8]")
@click.option(
    "--contexts", metavar="L,…", callback=_WHOLE, help="Prompt lengths.  [default: 128 and 1024, as far as they fit]"
)
@click.option(
    "--lookaheads",
    metavar="K,…",
    callback=_WHOLE,
    help="Draft tokens a round; 0, plain decoding, is always measured.  [default: of 1,2,4,6,8 those built for]",
)
@click.option("--tokens", type=int, default=48, show_default=True, help="Most new tokens of a text.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Runs of each combination; medians count.")
@click.option("--num-prompts", type=int, default=4, show_default=True, help="Prompts of a run, at least one a row.")
@click.option("--output", type=_FILE, help="Write what --json prints there.")
@click.option("--plot", type=_FILE, help="Draw the tables there (.png, .svg or .pdf); needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--threads", type=int, help="Compute threads.  [default: the cores available]")
@click.option("--spin/--no-spin", default=True, show_default=True, help="Let idle threads spin.")
@click.option("--max-model-len", type=int, help="Most tokens of a sequence.  [default: the bundle's limit]")
@click.option("--lora", metavar="NAME", help="LoRA adapter of the bundles to write with.  [default: none]")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def tune(
    bundles: tuple[Path, ...],
    *,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
    files: Seq[Path],
    threads: int | None,
    spin: bool,
    **asked: Any,
) -> None:
    """Find the fastest number of draft tokens (K) for BUNDLE on your prompts, by batch size and context.

    Prompts are repeated or cut in front to the lengths of --contexts. Of several bundles of one target, which are
    measured side by side, the fastest draft is named.
    """
    import json

    from specexport.atomic import check_writable, write_file
    from specexport.bench.prompts import read_prompts
    from specexport.progress import show_progress
    from specexport.simulate.plot import check_plot
    from specexport.tune.plot import write_plot
    from specexport.tune.report import describe_differences, print_tables
    from specexport.tune.run import run_tune

    if plot is not None:
        check_plot(plot)
    prompts = read_prompts(files)
    subjects, options = _resolve(bundles, threads=threads, spin=spin, **asked)
    for path in (output, plot):
        if path is not None:
            check_writable(path)
    with show_progress(sys.stderr, quiet=quiet) as progress:
        found = run_tune(
            subjects, [prompt.text for prompt in prompts], options, progress,
            command=["specexport", *sys.argv[1:]],
            settings={"prompts": [file.name for file in files], "threads": threads, "spin": spin},
        )  # fmt: skip
    text = json.dumps(found.to_json(), indent=1)
    if output is not None:

        def write(temporary: Path) -> None:
            temporary.write_text(text + "\n", encoding="utf-8")

        write_file(output, write)
    if as_json:
        click.echo(text)
    else:
        print_tables(found.tables, found.checks, found.pick)
    for line in describe_differences(found.checks):
        click.echo(line, err=True)
    if plot is not None:
        write_plot(plot, found.tables)


def _resolve(
    bundles: Seq[Path],
    *,
    threads: int | None,
    spin: bool,
    max_model_len: int | None,
    lora: str | None,
    **rest: Any,
) -> "tuple[dict[str, Subject], TuneOptions]":
    """What will be measured, and with what; all that can be refused is refused here."""
    from specexport.bench.subject import open_subject
    from specexport.tune.options import resolve_options
    from specexport.tune.targets import check_same_target, name_bundles
    from specexport_runtime.executors.open import check_threads

    check_threads(threads, "--threads")
    opened = [
        open_subject(bundle, max_model_len=max_model_len, num_threads=threads, spin=spin, lora=lora)
        for bundle in bundles
    ]
    subjects = name_bundles(bundles, opened)
    check_same_target(subjects)
    return subjects, resolve_options(subjects, **rest)
