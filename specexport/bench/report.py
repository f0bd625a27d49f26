"""A benchmark as Markdown: what was asked, on what machine, the table, and whether the texts are equal."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specexport.atomic import write_text
from specexport.bench.records import BenchResult, PromptRecord
from specexport.bench.runner import describe_cell
from specexport.bench.summary import BenchSummary, Fastest, find_fastest, pick_draft, summarize
from specexport.report import Column, markdown_table

SHOWN_DIFFERENCES = 5


def format_report(result: BenchResult, *, wide: bool = False) -> str:
    """The whole report, which ends in words; ``wide``: with all columns."""
    rows = summarize(result)
    table = format_table(rows, wide=wide)
    parts = [_heading(result), table, *format_fastest(find_fastest(rows)), describe_texts(result)]
    return "\n\n".join([*parts, *describe_idle_rows(result), *describe_speedups(rows)])


def write_markdown(path: Path, result: BenchResult, *, wide: bool = False) -> None:
    """Write :func:`format_report` in one step; UserInputError if the file cannot be written."""
    write_text(path, format_report(result, wide=wide) + "\n", errors="backslashreplace")


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


def format_table(rows: Sequence[BenchSummary], *, wide: bool = False) -> str:
    """The rows as a Markdown table; columns that say nothing are left out, and unless ``wide`` what few ask for."""
    several = wide and any(row.latency_p50 != row.latency_p99 for row in rows)  # prompts
    columns: list[Column[Any]] = [
        *_place_columns(rows),
        Column("K", lambda row: str(row.cell.requested or "-")),
        Column("tokens/s", lambda row: row.tokens_per_second, ".1f"),
        Column("spread", lambda row: row.spread, ".0%", shown=wide and _has_values(rows, "spread")),
        Column("decode tokens/s", lambda row: row.decode_tokens_per_second, ".1f", shown=wide),
        Column("speedup", lambda row: row.speedup, ".2f", "×"),
        Column("over vanilla", lambda row: row.over_vanilla, ".2f", "×", shown=_has_values(rows, "over_vanilla")),
        Column("over static", lambda row: row.over_static, ".2f", "×", shown=_has_values(rows, "over_static")),
        Column("acceptance", lambda row: row.acceptance_rate, ".3f"),
        Column("of branches", lambda row: row.branch_rate, ".3f", shown=wide and _has_values(rows, "branch_rate")),
        Column("accepted length", lambda row: row.mean_accepted_length, ".2f"),
        Column("padding ratio", lambda row: row.padding_ratio, ".1%", shown=wide),
        Column(
            "input padding", lambda row: row.input_padding, ".1%", shown=wide and any(row.input_padding for row in rows)
        ),
        Column("ms a token, P50", lambda row: row.latency_p50, ".1f", shown=several),
        Column("P99", lambda row: row.latency_p99, ".1f", shown=several),
        Column("moved a round", lambda row: row.moved, ".2f", shown=wide and any(row.moved for row in rows)),
        Column("moving", lambda row: row.moving, ".2%", shown=wide and any(row.moved for row in rows)),
        Column("schedule + pack", lambda row: row.overhead, ".1%", shown=wide),
    ]
    return markdown_table(columns, rows)


def _has_values(rows: Sequence[BenchSummary], name: str) -> bool:
    return any(getattr(row, name) is not None for row in rows)


def _place_columns(rows: Sequence[BenchSummary] | Sequence[Fastest]) -> list[Column[Any]]:
    """The method, and what its rows are compared within."""
    cells = [row.cell for row in rows]
    return [
        Column("method", lambda row: row.cell.label, left=True),
        Column("domain", lambda row: row.cell.domain, shown=len({cell.domain for cell in cells}) > 1),
        Column("batch", lambda row: row.cell.batch_size, shown=any(cell.batch_size > 1 for cell in cells)),
        Column("context", lambda row: str(row.cell.context), shown=any(cell.context for cell in cells)),
        Column("temperature", lambda row: row.cell.temperature, "g", shown=any(cell.temperature for cell in cells)),
        Column("batching", lambda row: row.cell.batching, shown=any(cell.batching == "static" for cell in cells)),
    ]


def format_fastest(found: Sequence[Fastest]) -> list[str]:
    """Every K side by side, and which draft is the best; nothing if no method has several values of K."""
    if not found:
        return []
    columns: list[Column[Any]] = [
        *_place_columns(found),
        *(
            Column(f"K={k}" if k else "plain", lambda each, k=k: each.rates.get(k), ".1f")  # type: ignore[misc]
            for k in sorted({k for each in found for k in each.rows})
        ),
        Column("fastest K", lambda each: str(each.lookahead or "0 (plain)")),
        Column("speedup", lambda each: each.speedup, ".2f", "×"),
        Column("draft ms", lambda each: each.drafting.draft_milliseconds, ".2f"),
        Column("verify ms", lambda each: each.drafting.verify_milliseconds, ".2f"),
    ]
    pick = pick_draft(found)
    table = markdown_table(columns, found)
    return [f"Decode tokens/s by draft tokens a round (K):\n\n{table}", *([pick.describe()] if pick else [])]


def describe_speedups(rows: Sequence[BenchSummary]) -> list[str]:
    """What it comes to: how fast ``auto``, or else the best method, is in each place, and what is fastest there."""
    found: dict[str, dict[str, float]] = {}  # speedups by place, by method
    for row in rows:
        if row.speedup is not None:
            found.setdefault(_describe_place(row, rows), {})[_describe_method(row)] = row.speedup
    drafting = [_describe_method(row) for row in rows if row.cell.drafter != "none" and row.speedup is not None]
    if not drafting:
        return []
    auto = [way for way in drafting if way == "auto"]
    shown = auto[0] if auto else max(drafting, key=lambda way: geometric_mean(s.get(way, 1.0) for s in found.values()))
    speeds = [(place, s[shown]) for place, s in found.items() if shown in s]
    words = [f"{speed:.2f}×{' as fast as plain decoding' * (not i)}{at}" for i, (at, speed) in enumerate(speeds)]
    best = {place: max(s, key=s.__getitem__) for place, s in found.items()}
    fastest = [f"{way}{place} ({found[place][way]:.2f}×)" for place, way in best.items()]
    line = f"{shown} is {', '.join(words)}."
    return [line] if set(best.values()) == {shown} else [f"{line} Fastest: {', '.join(fastest)}."]


def _describe_method(row: BenchSummary) -> str:
    """A method, and its number of draft tokens if that was fixed."""
    k = None if row.cell.drafter == row.cell.requested else row.cell.requested  # auto chooses K as it chooses drafters
    return row.cell.label if k is None else f"{row.cell.label}, K={k}"


def _describe_place(row: BenchSummary, rows: Sequence[BenchSummary]) -> str:
    """Words for what differs between the places of a benchmark, in front of which a speedup stands."""
    words = (("domain", " on {}"), ("batch_size", " in a batch of {}"), ("context", " with prompts of {} tokens"),
             ("temperature", " at temperature {:g}"), ("batching", ", {}"))  # fmt: skip
    differ = [(name, form) for name, form in words if len({getattr(each.cell, name) for each in rows}) > 1]
    return "".join(form.format(getattr(row.cell, name)) for name, form in differ)


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
