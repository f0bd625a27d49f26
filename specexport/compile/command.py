"""``specexport build``: flags in, a bundle out. Imports the pipeline when it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.backends.registry import DEFAULT_BACKEND
from specexport_runtime.bundle.quant_kinds import KEPT, list_rounding_kinds
from specexport_runtime.cli.gone import deprecated_option
from specexport_runtime.cli.grouped import RARE, GroupedCommand, add_under_heading

if TYPE_CHECKING:
    from specexport.compile.built import EngineCheck
    from specexport.compile.pipeline import BuildResult

_KINDS = "|".join((KEPT.name, *(kind.name for kind in list_rounding_kinds()), "none"))


def _make_number_parser(*words: str) -> Callable[[click.Context, click.Parameter, str | None], str | int | None]:
    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | int | None:
        if value is None or value in words:
            return value
        try:
            return int(value)
        except ValueError:
            names = " nor ".join(map(repr, words))
            raise click.BadParameter(f"{value!r} is neither a whole number nor {names}.") from None

    return read


@click.command(
    cls=GroupedCommand,
    first="draft head output recipe_file name quantize max_model_len lookahead force as_json quiet",
)
@click.argument("target", required=False)
@click.option("-o", "--output", "output", help="Folder of the bundle.")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML recipe; flags go before it.")
@click.option("--name", help="Name of the bundle.  [default: the output folder's name]")
@click.option("--force", is_flag=True, help="Replace a bundle that stands in the output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@add_under_heading(
    "Weights",
    click.option("--dtype", help="Dtype of float weights, on GPUs of all else too.  [default: auto]"),
    click.option("--quantize", metavar=_KINDS, help="Weights of the target.  [default: as its file has them]"),
    click.option(
        "--quantize-lm-head/--no-quantize-lm-head", default=None, help="Quantize the LM head too.  [default: yes]"
    ),
    click.option(
        "--lora",
        multiple=True,
        metavar="NAME=FOLDER",
        help="LoRA adapter of the target, merged; requests choose of several. Repeatable.",
    ),
    click.option("--lora-mode", metavar="merge|choose", help="What becomes of adapters.  [default: merge one]"),
)
@add_under_heading(
    "Drafting",
    click.option("--draft", help="Draft checkpoint. Without one texts copy from themselves and from earlier ones."),
    click.option(
        "--head", metavar="PATH|mtp", help="Draft head of the target, or the MTP module in its checkpoint, for a draft."
    ),
    click.option(
        "--num-speculative-tokens",
        "--lookahead",
        "lookahead",
        type=int,
        help="Most draft tokens a round (K).  [default: 8; tensorrt-rtx 4]",
    ),
    click.option("--draft-quantize", metavar=f"auto|{_KINDS}", help="Weights of the draft.  [default: auto]"),
    click.option("--draft-layers", type=int, metavar="N", help="Keep N of the draft's layers: those that change most."),
    click.option(
        "--draft-vocab-size",
        metavar="auto|all|N",
        callback=_make_number_parser("auto", "all"),
        help="Keep the N likeliest tokens of the draft's LM head. auto tries what is fastest, on texts of the target.  "
        "[default: auto]",
    ),
    click.option(
        "--draft-vocab-texts", metavar="PATH", help="File or folder of texts to try, measure and count them on."
    ),
    click.option("--self-draft", is_flag=True, default=None, help="Let the target draft with some of its own layers."),
)
@add_under_heading(
    "Machine",
    click.option("--backend", help=f"What runs the engines.  [default: {DEFAULT_BACKEND}]"),
    click.option(
        "--max-model-len",
        metavar="N|auto",
        callback=_make_number_parser("auto"),
        help="Most tokens of one sequence.  [default: auto]",
    ),
    click.option("--max-num-seqs", type=int, help="Most sequences at a time.  [default: 8]"),
    click.option("--max-num-tokens", type=int, help="Most tokens of one step.  [default: 512]"),
    click.option("--kv-cache-dtype", metavar="auto|int8", help="KV caches, on ort-cpu.  [default: auto]"),
    click.option(
        "--sm", multiple=True, metavar="NN", help="TensorRT: GPU architecture to build for, or any. Repeatable."
    ),
    click.option("--lowering", metavar="plugin", help="tensorrt: attention by our kernels.  [default: TensorRT's own]"),
    click.option("--gpu-memory-gb", type=float, help="TensorRT: refuse what a GPU of this memory cannot hold."),
)
@add_under_heading(
    "Sources",
    click.option("--revision", help="Hub revision of the target."),
    click.option("--draft-revision", help="Hub revision of the draft."),
    click.option("--head-revision", help="Hub revision of the head."),
    click.option("--trust-remote-code", is_flag=True, default=None, help="Run the hub's Python code while loading."),
)
@add_under_heading(
    RARE,
    click.option("--check", metavar="short|full|none", help="Compare with eager transformers.  [default: short]"),
    click.option("--no-check", "check", flag_value="none", help="The same as --check none."),
    click.option("--no-cache", is_flag=True, help="Neither use nor fill the cache of built engines."),
    click.option(
        "--fuse/--no-fuse", default=None, help="Pack and fuse operators where that is faster.  [default: yes]"
    ),
    click.option(
        "--dump-passes", type=click.Path(path_type=Path, file_okay=False), help="Write the graph after each pass there."
    ),
)
@deprecated_option("--prepack/--no-prepack", "engine files hold packed weights")
def build(
    *,
    recipe_file: Path | None,
    no_cache: bool,
    force: bool,
    dump_passes: Path | None,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Build a bundle from TARGET: a Hugging Face folder, a hub id, or a .gguf file."""
    from specexport.compile.head import find_unused_mtp_hint
    from specexport.compile.pipeline import build_bundle
    from specexport.host import set_malloc_threshold
    from specexport.progress import show_progress
    from specexport.recipe import make_recipe
    from specexport.report import print_json

    flags |= {name: flags[name] or None for name in ("sm", "lora")}
    recipe = make_recipe(flags, recipe_file)
    set_malloc_threshold()
    with show_progress(sys.stderr, quiet=quiet) as progress:
        result = build_bundle(recipe, progress=progress, dump_passes=dump_passes, force=force, use_cache=not no_cache)
    if as_json:
        print_json(result_to_json(result))
    else:
        click.echo(format_summary(result))
        hint = find_unused_mtp_hint(recipe)
        if hint is not None:
            click.echo(f"  hint: {hint}")


def result_to_json(result: "BuildResult") -> dict[str, Any]:
    """A build's result as plain values (seconds and bytes, not rounded)."""
    return {
        "bundle": str(result.path),
        "build_key": result.manifest.build_key,
        "up_to_date": result.up_to_date,
        "cached": list(result.reused),
        "seconds": dict(result.seconds),
        "total_seconds": sum(result.seconds.values()),
        "max_abs_errors": dict(result.max_abs_errors),
        "checks": {role: None if check is None else check._asdict() for role, check in result.checks.items()},
        "dropped_layers": {role: list(entry.dropped_layers) for role, entry in result.manifest.models.items()},
        "files": {name: entry.size for name, entry in result.files.items()},
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def format_summary(result: "BuildResult") -> str:
    """A build's result in a line or two for a reader."""
    from specexport.compile.draft_cuts import describe_layers
    from specexport.compile.draft_trial import describe_trial
    from specexport.compile.head import describe_probe
    from specexport.compile.token_map import describe_share

    total = sum(entry.size for entry in result.files.values())
    if result.up_to_date:
        return f"{result.path} is up to date ({total / 1e6:.1f} MB): nothing to do."
    lines = [
        f"Built {result.path} ({total / 1e6:.1f} MB) in {sum(result.seconds.values()):.1f} s, "
        f"peak memory {result.peak_memory_bytes / 1e6:.0f} MB."
    ]
    for role, check in result.checks.items():
        cached = " (engine from the cache)" if role in result.reused else ""
        entry = result.manifest.models[role]
        found = "not checked" if check is None else _describe_check(check)
        if entry.approximation is not None:
            found = f"{entry.approximation}, {found}"
        head = entry.draft_head
        if head is not None and head.guessed is not None:
            found = f"{found}; {describe_probe(head.guessed, head.reading)}"
        layers = describe_layers(entry)
        if layers:
            found = f"{layers}, {found}"
        lines.append(f"  {role}: {found}{cached}")
        lines += [f"  {role}: {line}" for line in describe_trial(entry)[:1]]
        if entry.token_map is not None:
            lines.append(
                f"  {role}: another vocabulary than the target's: they share {describe_share(entry.token_map)}"
            )
        if check is not None and check.perplexity is not None and check.perplexity * _CHANCE > entry.vocab_size:
            lines.append(
                f"  warning: on text the {role}'s perplexity is {check.perplexity:.3g}, of {entry.vocab_size} tokens: "
                "that is chance. Its weights are random, or read otherwise than they were stored."
            )
    return "\n".join(lines)


_CHANCE = 4
"""A model of which a text is this many times likelier than any tokens knows something of it."""


def _describe_check(check: "EngineCheck") -> str:
    if check.divergence is None:
        return f"logits within {check.max_abs_error:.1e} of eager transformers"
    words = f"divergence {check.divergence:.2g} nats from eager transformers on a text"
    return words if check.agreement is None else f"{words}, {check.agreement:.0%} of its best tokens"
