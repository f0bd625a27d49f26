"""``specexport debug``: which layer of a graph goes wrong, and what it costs."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.debug.run import GRAPHS, STEPS
from specexport.report import Column, print_json, print_report, terminal_table
from specexport_runtime.bundle.quant_kinds import list_rounding_kinds
from specexport_runtime.cli.options import engine_flag

if TYPE_CHECKING:
    from rich.table import Table

    from specexport.debug.compare import Comparison, LayerRow
    from specexport.debug.run import DebugReport

_LIMITS = "; ".join(f"{kind.name}: {kind.limits.tensor}" for kind in list_rounding_kinds())
_ROLES = ("target", "draft")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 text file.")
@click.option("--against", type=click.Path(path_type=Path), help="Bundle of the same checkpoint: the reference.")
@click.option(
    "--graph", type=click.Choice(GRAPHS), default="engine", show_default=True, help="Which graph of the model."
)
@click.option("--role", type=click.Choice(_ROLES), default="target", show_default=True, help="Which model.")
@click.option("--step", type=click.Choice(STEPS), default="verify", show_default=True, help="Which kind of step.")
@click.option("--after", type=int, default=0, show_default=True, help="Tokens to decode before the step.")
@click.option("--tolerance", type=float, help=f"Largest relative error.  [default: 1e-4; {_LIMITS}]")
@click.option("--layer", "layers", multiple=True, help="Rank these layers only; * stands for anything. Repeatable.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of the table.")
@click.option("--save", type=click.Path(path_type=Path), help="New folder: both models and the step, for polygraphy.")
@engine_flag("num_threads")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def debug(
    bundle: Path, prompt: str | None, *, prompt_file: Path | None, top: int, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Compare all layers of a step of BUNDLE with a reference, and rank those that hurt most.

    A decode after PROMPT (built in, if none is given) is stopped at a step, and two graphs get its inputs: that of
    BUNDLE and that of --against, or, without it, another graph of BUNDLE and its engine's own.
    """
    from specexport.debug.run import DebugOptions, debug_bundle
    from specexport.progress import show_progress
    from specexport.verify.prompts import DEFAULT_PROMPTS
    from specexport_runtime.cli.prompts import read_prompts
    from specexport_runtime.executors.open import check_threads

    check_threads(options["num_threads"], "--threads")
    asked = DebugOptions(**options)
    if prompt is None and prompt_file is None:
        prompt = DEFAULT_PROMPTS[0]
    (item,) = read_prompts(prompt, prompt_file, None)
    with show_progress(sys.stderr, quiet=quiet) as progress:
        found = debug_bundle(bundle, item.text, asked, progress=progress)
    if as_json:
        print_json(_record(found))
    else:
        _print(found, top, asked.save)


def _record(found: "DebugReport") -> dict[str, Any]:
    step = found.step
    return {
        "bundle": found.bundle,
        "reference": found.reference,
        "role": found.role,
        "graph": found.graph,
        "step": {"kind": step.kind, "tokens": list(step.tokens), "past": step.past},
        **to_json(found.comparison),
    }


def _print(found: "DebugReport", top: int, saved: Path | None) -> None:
    step = found.step
    graph = "" if found.graph == "engine" else f", {found.graph} graph"
    title = (
        f"{found.bundle}: {found.role}{graph}, against {found.reference}, in a {step.kind} step of {len(step.tokens)} "
        f"tokens after {step.past}"
    )
    lines = list(summary_lines(found.comparison, top))
    if saved is not None:
        lines.append(f"saved in {saved}: reference and debugged, each with model.onnx and inputs.json")
    print_report(make_table(found.comparison, top) if found.comparison.ranking else None, lines, before=title)


def to_json(found: "Comparison") -> dict[str, Any]:
    """The comparison as plain values; infinite and undefined numbers become null."""
    data = asdict(found)
    for record in (data, *data["rows"]):
        for key, value in record.items():
            if isinstance(value, float) and not abs(value) < float("inf"):
                record[key] = None
    return data


def make_table(found: "Comparison", top: int) -> "Table":
    """The layers that do most to the logits, at most ``top`` of them."""
    rows = [found.row(label) for label in found.ranking]
    total = sum(row.divergence or 0.0 for row in rows)
    columns: list[Column[LayerRow]] = [
        Column("layer", lambda row: row.label, left=True),
        Column("KL alone", lambda row: row.divergence or 0.0, ".2e"),
        Column("share", lambda row: (row.divergence or 0.0) / total if total > 0 else None, ".1%"),
        Column("own error", lambda row: row.own_error, ".2e"),
        Column("error", lambda row: row.error, ".2e"),
    ]
    return terminal_table(columns, rows[:top])


def summary_lines(found: "Comparison", top: int) -> Iterator[str]:
    """What the table does not say."""
    outside = sum(not row.within for row in found.rows)
    if found.first is None:
        yield f"all {len(found.rows)} tensors are within the tolerance of {found.tolerance:g}"
    else:
        yield (
            f"first beyond the tolerance of {found.tolerance:g}: {found.first} "
            f"(error {found.row(found.first).error:.2e}; {outside} of {len(found.rows)} tensors are beyond it)"
        )
    if len(found.ranking) > top:
        yield f"{len(found.ranking) - top} more layers differ; --top shows them"
    if not found.ranking and all(row.own_error is not None for row in found.rows):
        yield "no layer has an error of its own beyond the order of additions"
    yield (
        f"all together: KL {found.divergence:.2e}, the same likeliest token in {found.same_token:.0%} of the logit rows"
    )
    if found.replayed_error:
        yield f"the graph with its layers as outputs gives the engine's own logits up to {found.replayed_error:.1e}"
