"""Rows of the report: written as they come, read back whatever became of their task, and formatted as Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Verdict = Literal["ok", "missed", "info", "failed", "skipped"]
MAX_TEXT = 300
OUT_OF_TIME = "out of time"
"""What a row says that was skipped because the time was over."""


class Row(NamedTuple):
    """One line of the report."""

    section: str  # heading it stands under
    what: str  # what was looked at
    value: str  # what was found, for people
    target: str = ""  # what it must reach; empty for none
    # ``"ok"`` or ``"missed"`` where there is a target or a right answer, ``"info"`` where there is none, ``"failed"``
    # (an error, whose reason is the value) or ``"skipped"`` (it was not tried; the value says why)
    verdict: Verdict = "info"
    data: Mapping[str, Any] = {}  # the numbers behind ``value``
    is_detail: bool = False  # only in the JSON file and the details, not in the table


def judge(value: float, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Whether a number reaches its target; NaN never does."""
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return "ok" if reached and value == value else "missed"  # noqa: PLR0124 - NaN


def reason_of(error: BaseException) -> str:
    """An exception on one line: its kind, its message, and how to fix it if it says so."""
    text = str(error).strip() or "no message"
    hint = getattr(error, "hint", None)
    if hint and str(hint) not in text:
        text += f" {hint}"
    return clean(f"{type(error).__name__}: {text}")


def clean(text: str) -> str:
    """Text for a table cell: one line, no bars, not longer than ``MAX_TEXT``."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


class Recorder:
    """Appends rows of one section to a file of JSON lines, each on the disk before the next is measured."""

    def __init__(self, path: Path, section: str) -> None:
        self.path, self.section = path, section
        path.parent.mkdir(parents=True, exist_ok=True)

    def row(
        self,
        what: str,
        value: str,
        /,
        *,
        target: str = "",
        verdict: Verdict = "info",
        is_detail: bool = False,
        **data: Any,
    ) -> None:
        """Write one row; see :class:`Row`."""
        row = Row(self.section, what, clean(value), target, verdict, data, is_detail)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row._asdict(), default=str) + "\n")

    def fail(self, what: str, error: BaseException) -> None:
        """Write the row of something that raised."""
        self.row(what, f"failed: {reason_of(error)}", verdict="failed")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, without a last line that was cut off."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows


def format_report(rows: Sequence[Row], head: Sequence[str]) -> str:
    """The Markdown report: ``head``, a summary, one table for each section, and the detail rows behind them."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("ok", "missed", "failed", "skipped")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [*head, "", f"Rows with a right answer or a target: {summary}.", ""]
    plain = [row for row in rows if not row.is_detail]
    for section in sorted({row.section for row in plain}):  # their numbers are the order
        lines += _table(section, (row for row in plain if row.section == section))
    if details := [row for row in rows if row.is_detail]:
        lines += _table("details", details)
    return "\n".join(lines)


def _table(title: str, rows: Iterable[Row]) -> list[str]:
    lines = [f"## {title}", "", "| what | found | target | verdict |", "| --- | --- | --- | --- |"]
    lines += [f"| {clean(row.what)} | {clean(row.value)} | {row.target} | {row.verdict} |" for row in rows]
    return [*lines, ""]


def write_report(folder: Path, rows: Sequence[Row], head: Sequence[str], about: Mapping[str, Any]) -> None:
    """Write ``results.json`` and ``results.md``, each in one step; the JSON file says ``about`` beside the rows.

    ``head`` are the lines before the tables of ``results.md``. The folder is created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {**about, "rows": [row._asdict() for row in rows]}
    contents = {
        "results.json": json.dumps(record, indent=1, default=str) + "\n",
        "results.md": format_report(rows, head),
    }
    for name, content in contents.items():
        temporary = folder / f".{name}.tmp"
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(folder / name)
