"""``specexport tune``: parse what is asked, measure, write the profile. Everything heavy is imported when it runs."""

import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.bench.command import list_of
from specexport_runtime.errors import UserInputError

if TYPE_CHECKING:
    from specexport_runtime.costs.tune_profile import TuneProfile

_FILE = click.Path(path_type=Path, dir_okay=False)
_WHOLE = list_of(int, "whole numbers")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts", "files", type=_FILE, multiple=True, required=True, help="JSONL with a field `prompt`. Repeatable."
)
@click.option(
    "--drafter",
    "drafters",
    metavar="NAME",
    multiple=True,
    help="draft-model, lookup or self. Repeatable.  [default: all that the bundle has]",
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
@click.option("--output", type=_FILE, help="Write the profile there.  [default: the user's cache, where engines look]")
@click.option("--plot", type=_FILE, help="Draw the profile there (.png, .svg or .pdf); needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON instead of a table.")
@click.option("--threads", type=int, help="Compute threads.  [default: the cores available]")
@click.option("--spin/--no-spin", default=True, show_default=True, help="Let idle threads spin.")
@click.option("--max-model-len", type=int, help="Most tokens of a sequence.  [default: the bundle's limit]")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def tune(bundle: Path, *, output: Path | None, plot: Path | None, as_json: bool, **asked: Any) -> None:
    """Find the fastest number of draft tokens (K) for BUNDLE on your prompts, by batch size and context.

    Prompts are repeated or cut in front to the lengths of --contexts. The result is a profile that `--lookahead auto`
    then stays within on this machine; another machine or another build of the bundle needs its own.
    """
    import json

    from specexport.atomic import check_writable
    from specexport.simulate.plot import check_plot
    from specexport.tune.plot import write_plot
    from specexport.tune.report import print_profile

    place = output or _default_place(bundle)
    if plot is not None:
        check_plot(plot)
    for path in (place, plot):
        if path is not None:
            check_writable(path)
    profile = _measure(bundle, **asked)
    _write(place, profile, private=output is None)
    if as_json:
        click.echo(json.dumps(profile.to_json(), indent=1))
    else:
        print_profile(profile)
    click.echo(f"profile: {place}", err=True)
    if plot is not None:
        write_plot(plot, profile)


def _default_place(bundle: Path) -> Path:
    from specexport_runtime.bundle.manifest import load_manifest
    from specexport_runtime.costs.tune_profile import default_path

    load_manifest(bundle)  # no folder is made for what is no bundle
    place = default_path(bundle, writable=True)
    if place is None:
        raise UserInputError("the user's cache cannot be written, so the profile has no place.", "give --output FILE.")
    return place


def _measure(
    bundle: Path,
    *,
    files: Seq[Path],
    threads: int | None,
    spin: bool,
    max_model_len: int | None,
    quiet: bool,
    **rest: Any,
) -> "TuneProfile":
    from datetime import UTC, datetime

    from specexport.bench.prompts import read_prompts
    from specexport.bench.subject import open_subject
    from specexport.progress import show_progress
    from specexport.tune.measure import Tuner
    from specexport.tune.options import resolve_options
    from specexport_runtime.costs.tune_profile import TuneProfile
    from specexport_runtime.executors.open import check_threads
    from specexport_runtime.machine import machine_key

    check_threads(threads, "--threads")
    prompts = read_prompts(files)
    subject = open_subject(bundle, max_model_len=max_model_len, num_threads=threads, spin=spin)
    options = resolve_options(subject, max_model_len=subject.details["max_model_len"], **rest)
    with show_progress(sys.stderr, quiet=quiet) as progress:
        cells = Tuner(subject, [prompt.text for prompt in prompts], options, progress).run()
    return TuneProfile(
        bundle=subject.name,
        build_key=subject.details["build_key"],
        machine=machine_key(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=("specexport", *sys.argv[1:]),
        settings={
            "tokens": options.tokens,
            "repeats": options.repeats,
            "num_prompts": options.num_prompts,
            "prompts": [file.name for file in files],
            "threads": threads,
            "spin": spin,
        },
        cells=cells,
    )


def _write(path: Path, profile: "TuneProfile", *, private: bool) -> None:
    import json

    from specexport.atomic import write_file

    def write(temporary: Path) -> None:
        temporary.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
        if private:  # what others may write to is not trusted in the cache
            temporary.chmod(0o600)

    write_file(path, write)
