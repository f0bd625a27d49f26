"""A benchmark as Markdown: what was asked, on what machine, the table, and whether the texts are equal."""

import shlex
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from specexport.atomic import write_file
from specexport.bench.methods import Cell
from specexport.bench.records import BenchResult, PromptRecord
from specexport.bench.runner import describe_cell
from specexport.bench.summary import Summary, summarize

SHOWN_DIFFERENCES = 5

_Show = Callable[[Summary], str]


def format_report(result: BenchResult) -> str:
    """The whole report."""
    parts = [_heading(result), format_table(summarize(result)), describe_texts(result)]
    return "\n\n".join([*parts, *describe_idle_rows(result)])


def write_markdown(path: Path, result: BenchResult) -> None:
    """Write :func:`format_report` in one step; UserInputError if the file cannot be written."""
    text = format_report(result) + "\n"

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")

    write_file(path, write)


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
        ]
    )


def format_table(rows: Seq[Summary]) -> str:
    """The rows as a Markdown table; columns that say nothing are left out."""
    columns = _columns(rows)
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(2, *(len(line[i]) for line in cells)) for i in range(len(columns))]
    lines = ["| " + " | ".join(_pad(line, widths)) + " |" for line in cells]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rules) + " |", *lines[1:]])


def _pad(line: Seq[str], widths: Seq[int]) -> list[str]:
    return [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]


def _columns(rows: Seq[Summary]) -> dict[str, _Show]:
    columns: dict[str, _Show] = {"method": lambda row: row.cell.label}
    if _varies(rows, lambda cell: cell.domain):
        columns["domain"] = lambda row: row.cell.domain
    columns["batch"] = lambda row: str(row.cell.batch_size)
    columns["K"] = lambda row: str(row.cell.requested or "-")
    if any(row.cell.temperature for row in rows):
        columns["temperature"] = lambda row: f"{row.cell.temperature:g}"
    if any(row.cell.batching == "static" for row in rows):
        columns["batching"] = lambda row: row.cell.batching
    columns["tokens/s"] = lambda row: f"{row.tokens_per_second:.1f}"
    if any(row.spread is not None for row in rows):
        columns["spread"] = lambda row: _number(row.spread, ".0%")
    columns["decode tokens/s"] = lambda row: _number(row.decode_tokens_per_second, ".1f")
    columns["speedup"] = lambda row: _number(row.speedup, ".2f", "×")
    if any(row.over_vanilla is not None for row in rows):
        columns["over vanilla"] = lambda row: _number(row.over_vanilla, ".2f", "×")
    if any(row.over_static is not None for row in rows):
        columns["over static"] = lambda row: _number(row.over_static, ".2f", "×")
    columns["acceptance"] = lambda row: _number(row.acceptance_rate, ".3f")
    columns["accepted length"] = lambda row: _number(row.mean_accepted_length, ".2f")
    columns["padding ratio"] = lambda row: f"{row.padding_ratio:.1%}"
    if any(row.input_padding for row in rows):
        columns["input padding"] = lambda row: f"{row.input_padding:.1%}"
    if any(row.latency for row in rows):
        columns["ms a token, P50"] = lambda row: f"{row.latency_p50:.1f}"
        columns["P99"] = lambda row: f"{row.latency_p99:.1f}"
    columns["schedule + pack"] = lambda row: f"{row.overhead:.1%}"
    return columns


def _varies(rows: Seq[Summary], value: Callable[[Cell], object]) -> bool:
    return len({value(row.cell) for row in rows}) > 1


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


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
