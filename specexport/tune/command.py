"""``specexport tune``: parse what is asked, measure, write the profiles. Everything heavy is imported when it runs."""

import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.bench.command import list_of
from specexport_runtime.errors import InvalidRequestError, UserInputError

if TYPE_CHECKING:
    from specexport.bench.subject import Subject
    from specexport.tune.options import TuneOptions
    from specexport_runtime.costs.tune_profile import TuneProfile

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
@click.option(
    "--output",
    type=_FILE,
    help="Write the profile of a single bundle there.  [default: the user's cache, where engines look]",
)
@click.option("--plot", type=_FILE, help="Draw the profiles there (.png, .svg or .pdf); needs matplotlib.")
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

    Prompts are repeated or cut in front to the lengths of --contexts. The result is a profile that `--lookahead auto`
    then stays within on this machine; another machine or another build of the bundle needs its own.

    Several bundles of one target are measured side by side. Each gets its profile, and the fastest draft is named.
    """
    import json

    from specexport.atomic import check_writable
    from specexport.bench.prompts import read_prompts
    from specexport.progress import show_progress
    from specexport.simulate.plot import check_plot
    from specexport.tune.plot import write_plot
    from specexport.tune.report import describe_differences, print_profiles
    from specexport.tune.run import run_tune

    if output is not None and len(bundles) > 1:
        raise InvalidRequestError(
            f"--output names one file, and {len(bundles)} bundles have a profile each.",
            "leave it out, or tune one bundle at a time.",
        )
    if plot is not None:
        check_plot(plot)
    prompts = read_prompts(files)
    subjects, options = _resolve(bundles, threads=threads, spin=spin, **asked)
    places = [output or _default_place(bundle, alone=len(bundles) == 1) for bundle in bundles]
    for path in (*places, plot):
        if path is not None:
            check_writable(path)
    with show_progress(sys.stderr, quiet=quiet) as progress:
        found = run_tune(
            subjects, [prompt.text for prompt in prompts], options, progress,
            command=["specexport", *sys.argv[1:]],
            settings={"prompts": [file.name for file in files], "threads": threads, "spin": spin},
        )  # fmt: skip
    for place, profile in zip(places, found.profiles.values(), strict=True):
        _write(place, profile, private=output is None)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_profiles(found.profiles, found.checks, found.pick)
    for line in [*describe_differences(found.checks), *(f"profile: {place}" for place in places)]:
        click.echo(line, err=True)
    if plot is not None:
        write_plot(plot, found.profiles)


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


def _default_place(bundle: Path, *, alone: bool) -> Path:
    from specexport_runtime.costs.tune_profile import default_path

    place = default_path(bundle, writable=True)
    if place is None:
        fix = "give --output FILE." if alone else "tune one bundle at a time, with --output FILE."
        raise UserInputError("the user's cache cannot be written, so the profile has no place.", fix)
    return place


def _write(path: Path, profile: "TuneProfile", *, private: bool) -> None:
    import json

    from specexport.atomic import write_file

    def write(temporary: Path) -> None:
        temporary.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
        if private:  # what others may write to is not trusted in the cache
            temporary.chmod(0o600)

    write_file(path, write)
