"""A benchmark as Markdown: what was asked, on what machine, the table, and whether the texts are equal."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specexport.atomic import write_text
from specexport.bench.records import BenchResult, PromptRecord
from specexport.bench.runner import describe_cell
from specexport.bench.summary import Fastest, Summary, find_fastest, pick_draft, summarize
from specexport.report import format_number, markdown_table

SHOWN_DIFFERENCES = 5

_Show = Callable[[Any], str]  # a column of a table, from one of its rows


def format_report(result: BenchResult) -> str:
    """The whole report."""
    rows = summarize(result)
    parts = [_heading(result), format_table(rows), *format_fastest(find_fastest(rows)), describe_texts(result)]
    return "\n\n".join([*parts, *describe_idle_rows(result)])


def write_markdown(path: Path, result: BenchResult) -> None:
    """Write :func:`format_report` in one step; UserInputError if the file cannot be written."""
    write_text(path, format_report(result) + "\n", errors="backslashreplace")


def _heading(result: BenchResult) -> str:
    machine, options, bundle = result.machine, result.options, result.bundle
    low, high = options["max_tokens"]
    lengths = f"{low}" if low == high else f"{low} to {high}"
    repeats = options["repeats"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = "" if machine["load_1min"] is None else f", load {machine['load_1min']:.1f}"
    threads = "all cores" if bundle.get("threads") is None else f"threads {bundle['threads']}"
    ids = {record.id for record in result.prompts}
    return "\n".join(
        [
            f"`{shlex.join(result.command)}`",
            "",
            f"{bundle['name']}, {threads}: {len(ids)} prompts, {lengths} new tokens each, "
            f"{'median of ' if repeats > 1 else ''}{repeats} run{'s' * (repeats > 1)}.",
            f"{machine['cpu']}, {machine['cores']} cores{load}, {machine['memory_bytes'] / 1e9:.0f} GB; "
            f"Python {machine['python']}, {versions}.",
            *(_describe_draft(name, details["models"]) for name, details in bundle.get("bundles", {}).items()),
        ]
    )


def _describe_draft(name: str, models: Mapping[str, Any]) -> str:
    draft = models.get("draft") or models["head"]
    rows, vocab_size = draft["head_size"], draft["vocab_size"]
    ids = "" if rows == vocab_size else f", {rows} of {vocab_size} tokens"
    form = f"{draft['quantize'] or draft['dtype']}, {draft['num_layers']} layers{ids}"
    return f"- {name}: {draft['source']}, {form}, {draft['engine_bytes'] / 1e6:.1f} MB"


def format_table(rows: Sequence[Summary]) -> str:
    """The rows as a Markdown table; columns that say nothing are left out."""
    columns = _place_columns(rows) | {"K": lambda row: str(row.cell.requested or "-")}
    columns["tokens/s"] = lambda row: f"{row.tokens_per_second:.1f}"
    if any(row.spread is not None for row in rows):
        columns["spread"] = lambda row: format_number(row.spread, ".0%")
    columns["decode tokens/s"] = lambda row: format_number(row.decode_tokens_per_second, ".1f")
    columns["speedup"] = lambda row: format_number(row.speedup, ".2f", "×")
    if any(row.over_vanilla is not None for row in rows):
        columns["over vanilla"] = lambda row: format_number(row.over_vanilla, ".2f", "×")
    if any(row.over_static is not None for row in rows):
        columns["over static"] = lambda row: format_number(row.over_static, ".2f", "×")
    columns["acceptance"] = lambda row: format_number(row.acceptance_rate, ".3f")
    columns["accepted length"] = lambda row: format_number(row.mean_accepted_length, ".2f")
    columns["padding ratio"] = lambda row: f"{row.padding_ratio:.1%}"
    if any(row.input_padding for row in rows):
        columns["input padding"] = lambda row: f"{row.input_padding:.1%}"
    if any(row.latency for row in rows):
        columns["ms a token, P50"] = lambda row: f"{row.latency_p50:.1f}"
        columns["P99"] = lambda row: f"{row.latency_p99:.1f}"
    columns["schedule + pack"] = lambda row: f"{row.overhead:.1%}"
    return markdown_table(columns, rows, left=1)


def _place_columns(rows: Sequence[Summary] | Sequence[Fastest]) -> dict[str, _Show]:
    """The method, and what its rows are compared within."""
    columns: dict[str, _Show] = {"method": lambda row: row.cell.label}
    if len({row.cell.domain for row in rows}) > 1:
        columns["domain"] = lambda row: row.cell.domain
    columns["batch"] = lambda row: str(row.cell.batch_size)
    if any(row.cell.context for row in rows):
        columns["context"] = lambda row: str(row.cell.context)
    if any(row.cell.temperature for row in rows):
        columns["temperature"] = lambda row: f"{row.cell.temperature:g}"
    if any(row.cell.batching == "static" for row in rows):
        columns["batching"] = lambda row: row.cell.batching
    return columns


def _show_rate(lookahead: int, found: Fastest) -> str:
    return format_number(found.rates.get(lookahead), ".1f")


def format_fastest(found: Sequence[Fastest]) -> list[str]:
    """Every K side by side, and which draft is the best; nothing if no method has several values of K."""
    if not found:
        return []
    columns = _place_columns(found)
    for k in sorted({k for each in found for k in each.rows}):
        columns[f"K={k}" if k else "plain"] = partial(_show_rate, k)
    columns["fastest K"] = lambda each: str(each.lookahead or "0 (plain)")
    columns["speedup"] = lambda each: f"{each.speedup:.2f}×"
    columns["draft ms"] = lambda each: format_number(each.drafting.draft_milliseconds, ".2f")
    columns["verify ms"] = lambda each: format_number(each.drafting.verify_milliseconds, ".2f")
    pick = pick_draft(found)
    table = markdown_table(columns, found, left=1)
    return [f"Decode tokens/s by draft tokens a round (K):\n\n{table}", *([pick.describe()] if pick else [])]


def describe_texts(result: BenchResult) -> str:
    """Whether every text is that of plain greedy decoding, and where not."""
    compared, different = result.compared, result.different
    if not compared:
        return "Sampled texts are not compared: each way to draft has its own draws."
    equal = len(compared) - len(different)
    line = f"Texts equal to plain greedy decoding: {equal} of {len(compared)} ({_floor_percent(equal, len(compared))})."
    more = len(different) - SHOWN_DIFFERENCES
    shown = [f"- {describe_difference(record)}" for record in different[:SHOWN_DIFFERENCES]]
    return "\n".join([line, *([""] if shown else []), *shown, *([f"- and {more} more"] if more > 0 else [])])


def describe_difference(record: PromptRecord) -> str:
    """Where a text differs from plain decoding."""
    where = f"prompt {record.id!r} differs from plain greedy decoding at token {record.first_difference}"
    return f"{where} ({describe_cell(record.cell)}, repeat {record.repeat})"


def _floor_percent(part: int, whole: int) -> str:
    # Cut, not rounded: 9999 of 10000 are not 100 %.
    return f"{1000 * part // whole / 10:g} %"


def describe_idle_rows(result: BenchResult) -> list[str]:
    """A note for each domain with fewer prompts than the largest batch has rows."""
    largest: dict[str, tuple[int, int]] = {}
    for run in result.runs:
        size = max(run.cell.batch_size, largest.get(run.cell.domain, (0, 0))[0])
        largest[run.cell.domain] = (size, run.num_prompts)
    return [
        f"Note: domain {domain!r} has {count} prompts for {size} rows; rows without a prompt stay idle."
        for domain, (size, count) in largest.items()
        if count < size
    ]
