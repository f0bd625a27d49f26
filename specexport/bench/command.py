"""``specexport bench``: parse what is asked, run it, report it. Everything heavy is imported when it runs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specexport.report import PRINTED, json_option
from specexport_runtime.cli.grouped import RARE, GroupedCommand, add_under_heading
from specexport_runtime.cli.options import engine_flag, pop_engine_options
from specexport_runtime.errors import CheckFailedError, InvalidRequestError

if TYPE_CHECKING:
    from specexport.bench.options import BenchOptions
    from specexport.bench.records import BenchResult
    from specexport.bench.subject import Subject

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_Parse = Callable[[click.Context, click.Parameter, str | None], Any]


def comma_separated(convert: Callable[[str], Any], what: str) -> _Parse:
    """A click callback: parts with commas between them, each once; None stays None."""

    def parse(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        if value is None:
            return None
        try:
            return tuple(dict.fromkeys(convert(part.strip()) for part in value.split(",")))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of {what} with commas between them.") from None

    return parse


def _lengths(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, int]:
    from specexport.bench.options import parse_lengths

    try:
        return parse_lengths(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no length: write 64, or 16:128 for lengths between.") from None


def _lookahead(text: str) -> int:
    from specexport.bench.methods import AUTO

    value = AUTO if text == "auto" else int(text)
    if value == AUTO and text != "auto":
        raise ValueError(text)
    return value


_LOOKAHEADS = comma_separated(_lookahead, "whole numbers or `auto`")
_NAMES, _WHOLE, _NUMBERS = (
    comma_separated(str, "names"),
    comma_separated(int, "whole numbers"),
    comma_separated(float, "numbers"),
)


@click.command(
    cls=GroupedCommand,
    first="files num_prompts methods num_speculative_tokens batch_size max_tokens repeats wide json_file quiet",
    renamed={"--tree-sizes": "--tree-size"},
)
@click.argument("bundles", metavar="[BUNDLE]…", type=click.Path(path_type=Path), nargs=-1)
@add_under_heading(
    "Texts",
    click.option(
        "--prompts",
        "files",
        type=_FILE,
        multiple=True,
        help="JSONL with `prompt`, and perhaps `id`, `domain`, `reference`. Repeatable.  [default: built in]",
    ),
    click.option("--num-prompts", type=int, help="Most prompts of each domain.  [default: all]"),
    click.option("--domains", metavar="D,…", callback=_NAMES, help="Domains to measure.  [default: all]"),
    click.option("--mix", is_flag=True, help="Measure all domains as one, prompts in turns, as a server meets them."),
    click.option("--contexts", metavar="L,…", callback=_WHOLE, help="Repeat or cut prompts to lengths.  [default: no]"),
    click.option(
        "--temperature", metavar="T,…", default="0", show_default=True, callback=_NUMBERS, help="0 is greedy."
    ),
    click.option(
        "--max-tokens",
        metavar="N or N:M",
        default="64",
        show_default=True,
        callback=_lengths,
        help="Most new tokens; N:M draws each prompt's number.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    engine_flag("lora"),
)
@add_under_heading(
    "Drafting",
    click.option(
        "--methods",
        metavar="M,…",
        callback=_NAMES,
        help="Of plain, draft-model, head, lookup, suffix, self, chained, auto, vanilla, unpad-kv, unpad-input; plain "
        "is always measured.  [default: plain, what the bundle can draft with, and auto; not suffix by itself]",
    ),
    click.option(
        "--num-speculative-tokens",
        "--lookahead",
        metavar="K,…",
        callback=_LOOKAHEADS,
        help="Draft tokens a round; `auto` chooses in every round.  [default: 4 of a draft model, 7 of lookup, 3 of "
        "self]",
    ),
    click.option(
        "--tree-size",
        "tree_sizes",
        metavar="N,…",
        callback=_LOOKAHEADS,
        help="Draft tokens tested in a round, branches included: 0 for chains; `auto` where K is auto.  [default: 0 of "
        "a fixed K, else auto]",
    ),
    click.option(
        "--search-layers",
        is_flag=True,
        help="Find the layers that drafts of the target with itself should leave out, and keep them in the bundle.",
    ),
)
@add_under_heading(
    "Runs",
    click.option(
        "--batch-size",
        metavar="B,…",
        default="1",
        show_default=True,
        callback=_WHOLE,
        help="Sequences decoded at a time.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of lengths and of sampling."),
    click.option(
        "--repeats", type=int, default=3, show_default=True, help="Runs of each combination; medians are shown."
    ),
    click.option("--warmup", type=int, default=1, show_default=True, help="Short runs after an engine is loaded."),
    click.option("--static", is_flag=True, help="Also run static batches, one group after another, for comparison."),
)
@engine_flag("num_threads")
@engine_flag("spin")
@engine_flag("max_model_len")
@engine_flag("max_num_batched_tokens", default=512, show_default=True)
@add_under_heading(
    "Report",
    click.option("--wide", is_flag=True, help="All columns: spread, decoding alone, padding, latencies, scheduling."),
    json_option("Print every record as JSON and nothing else; with FILE write them there."),
    click.option("--markdown", "markdown_file", type=_FILE, help="Write the report there too."),
    click.option("--plots", type=_FOLDER, help="Draw PNG files there; needs matplotlib."),
    click.option("--plot", type=_FILE, help="Draw speedups by K there (.png, .svg or .pdf); needs matplotlib."),
    click.option("--from-json", "saved", type=_FILE, help="Report a file of --json again; nothing is run."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress."),
)
@add_under_heading(
    RARE,
    click.option("--ablation", is_flag=True, help="All four ways to pad or not, with --drafter."),
    click.option("--drafter", default="lookup", show_default=True, help="Drafter of the padded methods."),
    engine_flag("unpad_kv", help="Of the methods that a drafter names."),
    engine_flag("unpad_input", help="Of the methods that a drafter names."),
)
def bench(
    bundles: tuple[Path, ...],
    *,
    json_file: Path | None,
    markdown_file: Path | None,
    plots: Path | None,
    plot: Path | None,
    saved: Path | None,
    wide: bool,
    search_layers: bool,
    **asked: Any,
) -> None:
    """Measure ways to decode with BUNDLE side by side: speed, acceptance, padding, and whether the texts are equal.

    With several values of K it names the fastest; of several bundles of one target, the best draft.

    Exits with 1 if a greedy text differs from plain decoding's.
    """
    from specexport.atomic import check_writable
    from specexport.bench.plots import write_plot, write_plots
    from specexport.bench.records import read_json, write_json
    from specexport.bench.report import describe_difference, format_report, write_markdown
    from specexport.bench.summary import find_fastest, pick_draft, summarize
    from specexport.plots import check_plot, check_plots

    if bool(bundles) == (saved is not None):
        wrong = "a bundle and --from-json were both" if bundles else "neither a bundle nor --from-json was"
        raise InvalidRequestError(f"{wrong} given.", "give one of the two.")
    check_plot(plot)
    for path in (json_file, markdown_file):
        if path not in (None, PRINTED):
            check_writable(path)
    if search_layers:
        _search_layers(bundles, json_file, **asked)
        return
    if plots is not None:
        check_plots(plots)
    result = read_json(saved) if saved is not None else _run(bundles, **asked)
    if json_file != PRINTED:
        click.echo(format_report(result, wide=wide))
    if json_file is not None:
        found = find_fastest(summarize(result))
        pick = pick_draft(found)
        more = {"fastest": [each.to_json() for each in found], "pick": None if pick is None else pick._asdict()}
        write_json(json_file, result, more)
    if markdown_file is not None:
        write_markdown(markdown_file, result, wide=wide)
    if plots is not None:
        for line in write_plots(plots, result).skipped:
            click.echo(line, err=True)
    if plot is not None and not write_plot(plot, result):
        click.echo(f"{plot} skipped: no method was measured at two values of K", err=True)
    if result.different:
        raise CheckFailedError(
            f"{len(result.different)} of {len(result.compared)} texts differ from plain greedy decoding: "
            f"{describe_difference(result.different[0])}.",
            "run `specexport verify` on the bundle to see the logit gap there.",
        )


def _run(
    bundles: Sequence[Path],
    *,
    files: Sequence[Path],
    num_prompts: int | None,
    domains: Sequence[str] | None,
    mix: bool,
    quiet: bool,
    **asked: Any,
) -> "BenchResult":
    from specexport.bench.bundles import join_subjects, name_bundles
    from specexport.bench.prompts import mix_domains, read_prompts
    from specexport.bench.runner import run_bench
    from specexport.bench.subject import open_subject
    from specexport.progress import show_progress

    engine = pop_engine_options(asked)
    prompts = read_prompts(files, num_prompts=num_prompts, domains=domains)
    prompts = mix_domains(prompts) if mix else prompts
    named = name_bundles(bundles, [open_subject(bundle, engine) for bundle in bundles])
    subject = join_subjects(named)
    options = _options(named, unpad_kv=engine.unpad_kv, unpad_input=engine.unpad_input, **asked)
    with show_progress(sys.stderr, quiet=quiet) as progress:
        return run_bench(subject, prompts, options, progress, command=["specexport", *sys.argv[1:]])


def _search_layers(
    bundles: Sequence[Path],
    json_file: Path | None,
    *,
    files: Sequence[Path],
    num_prompts: int | None,
    domains: Sequence[str] | None,
    temperature: tuple[float, ...],
    quiet: bool,
    **asked: Any,
) -> None:
    from specexport.bench.options import BenchOptions
    from specexport.bench.prompts import mix_domains, read_prompts
    from specexport.bench.search_layers import check_options, describe_search, search_layers
    from specexport.progress import show_progress
    from specexport.report import save_json

    context = click.get_current_context()
    given = ParameterSource.COMMANDLINE
    check_options([name for name in context.params if context.get_parameter_source(name) == given], bundles)
    if len(temperature) != 1:
        raise InvalidRequestError("--search-layers takes one --temperature.", "search at one.")
    options = BenchOptions(
        methods=(), temperatures=temperature, **{name: asked[name] for name in ("max_tokens", "ignore_eos", "seed")}
    )
    prompts = mix_domains(read_prompts(files, num_prompts=num_prompts, domains=domains))
    with show_progress(sys.stderr, quiet=quiet) as progress:
        result = search_layers(bundles[0], pop_engine_options(asked), prompts, options, progress)
    if json_file != PRINTED:
        click.echo(describe_search(result))
    if json_file is not None:
        save_json(json_file, {"command": ["specexport", *sys.argv[1:]], **result.to_json()})


def _options(
    named: "Mapping[str, Subject]",
    *,
    contexts: tuple[int, ...] | None,
    methods: Sequence[str] | None,
    ablation: bool,
    drafter: str,
    unpad_kv: bool,
    unpad_input: bool,
    batch_size: tuple[int, ...],
    temperature: tuple[float, ...],
    static: bool,
    **rest: Any,
) -> "BenchOptions":
    from specexport.bench.bundles import check_room, compared_methods
    from specexport.bench.methods import ablation as ablation_of
    from specexport.bench.options import BATCHINGS, BenchOptions

    if ablation and (methods is not None or not (unpad_kv and unpad_input)):
        raise InvalidRequestError(
            "--ablation already says which methods and modes are measured.",
            "drop --methods, --no-unpad-kv and --no-unpad-input, or --ablation.",
        )
    names = ablation_of(drafter) if ablation else methods
    padding: dict[str, Any] = {"drafter": drafter, "unpad_kv": unpad_kv, "unpad_input": unpad_input}
    options = BenchOptions(
        methods=tuple(compared_methods(named, names, **padding)),
        batch_sizes=batch_size,
        contexts=contexts or (),
        temperatures=temperature,
        batchings=BATCHINGS if static else BATCHINGS[:1],
        **rest,
    )
    check_room(named, options)
    return options
