"""The rows of ``specexport simulate``: computing, printing and recording them."""

import json
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from specexport.atomic import write_file
from specexport.simulate.checks import check_count
from specexport.simulate.closed_form import (
    Padding,
    Speedup,
    StepCost,
    batch_padding,
    best_draft_length,
    expected_speedup,
)
from specexport.simulate.monte_carlo import (
    Drafts,
    Estimate,
    GenerationEstimate,
    RoundEstimate,
    simulate_generations,
    simulate_rounds,
)

SCHEMA = "specexport.simulate/1"


class Study(NamedTuple):
    """What to compute."""

    accuracies: Seq[float]  # a of each row
    batch_sizes: Seq[int]  # b of each row; all pairs are computed
    draft_length: int  # n
    hit_rate: float = 1.0  # h
    concentration: float | None = None  # of the Beta distribution of the accuracies
    cost: StepCost = StepCost()
    max_draft_length: int = 16  # largest K tried for the best one
    samples: int = 10000  # simulated rounds of each row
    max_new_tokens: int | None = None  # of each simulated generation; None simulates none
    prompt_tokens: int = 0  # in each cache at the start of a generation
    generations: int = 100  # simulated generations of each row
    seed: int = 0


class Row(NamedTuple):
    """One accuracy at one batch size."""

    accuracy: float
    batch_size: int
    exact: Padding
    simulated: RoundEstimate
    speedup: Speedup
    best_draft_length: int
    generation: GenerationEstimate | None


def compute_rows(study: Study) -> list[Row]:
    """Every accuracy at every batch size; a value out of its range raises UserInputError."""
    check_count("The number of generations", study.generations)
    pairs = [(accuracy, batch_size) for accuracy in study.accuracies for batch_size in study.batch_sizes]
    return [_compute_row(study, *pair, seed=(study.seed, index)) for index, pair in enumerate(pairs)]


def _compute_row(study: Study, accuracy: float, batch_size: int, seed: tuple[int, int]) -> Row:
    model: dict[str, Any] = {"hit_rate": study.hit_rate, "concentration": study.concentration}
    drafts = Drafts(accuracy, study.draft_length, **model)
    exact = batch_padding(accuracy, batch_size, study.draft_length, **model)
    generation = None
    if study.max_new_tokens is not None:
        generation = simulate_generations(
            drafts, batch_size, max_new_tokens=study.max_new_tokens, prompt_tokens=study.prompt_tokens,
            samples=study.generations, seed=(*seed, 1),
        )  # fmt: skip
    return Row(
        accuracy,
        batch_size,
        exact,
        simulate_rounds(drafts, batch_size, samples=study.samples, seed=(*seed, 0)),
        expected_speedup(accuracy, study.draft_length, study.cost, batch_size=batch_size, **model),
        best_draft_length(
            accuracy, study.cost, max_draft_length=study.max_draft_length, batch_size=batch_size, **model
        ),
        generation,
    )


def largest_deviation(rows: Iterable[Row]) -> float:
    """The simulated padding ratio farthest from the exact one, in standard errors."""
    return max((abs(row.simulated.ratio.deviations(row.exact.ratio) or 0.0) for row in rows), default=0.0)


def _columns(rows: Seq[Row], max_draft_length: int) -> dict[str, Callable[[Row], str]]:
    columns: dict[str, Callable[[Row], str]] = {
        "accuracy": lambda row: f"{row.accuracy:g}",
        "batch": lambda row: f"{row.batch_size}",
        "accepted": lambda row: f"{row.exact.accepted:.3f}",
        "longest": lambda row: f"{row.exact.longest:.3f}",
        "padding": lambda row: f"{row.exact.padding:.3f}",
        "ratio": lambda row: f"{row.exact.ratio:.1%}",
        "ratio, simulated": lambda row: _percent(row.simulated.ratio),
        "speedup": lambda row: f"{row.speedup.unpadded:.2f}",
    }
    if any(row.speedup.padded != row.speedup.unpadded for row in rows):
        columns["padded"] = lambda row: f"{row.speedup.padded:.2f}"
    columns["best K"] = lambda row: f"{'≥ ' * (row.best_draft_length == max_draft_length)}{row.best_draft_length}"
    if any(row.generation for row in rows):
        columns |= {
            "rounds": lambda row: f"{row.generation.rounds.mean:.1f}" if row.generation else "",
            "ratio, whole": lambda row: _percent(row.generation.ratio) if row.generation else "",
            "idle": lambda row: f"{row.generation.idle.mean:.1%}" if row.generation else "",
            "cache": lambda row: f"{row.generation.cache_slots.mean:.2f}" if row.generation else "",
        }
    return columns


def _percent(estimate: Estimate) -> str:
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.1%}"
    return f"{estimate.mean:.1%}{error}"


def format_table(rows: Seq[Row], max_draft_length: int) -> str:
    """The rows as a Markdown table; a best K of ``max_draft_length`` is shown as a lower limit."""
    columns = _columns(rows, max_draft_length)
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
             for line in cells]  # fmt: skip
    lines.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(lines)


def record(study: Study, rows: Iterable[Row]) -> dict[str, Any]:
    """Parameters and rows as plain values; numbers are not rounded."""
    parameters = study._asdict() | {
        "accuracies": list(study.accuracies),
        "batch_sizes": list(study.batch_sizes),
        "cost": study.cost._asdict(),
    }
    return {"schema": SCHEMA, "parameters": parameters, "rows": [_record_row(row) for row in rows]}


def _record_row(row: Row) -> dict[str, Any]:
    return {
        "accuracy": row.accuracy,
        "batch_size": row.batch_size,
        "exact": row.exact._asdict() | {"ratio": row.exact.ratio},
        "simulated": _record_estimates(row.simulated),
        "deviations": row.simulated.ratio.deviations(row.exact.ratio),
        "speedup": row.speedup._asdict(),
        "best_draft_length": row.best_draft_length,
        "generation": None if row.generation is None else _record_estimates(row.generation),
    }


def _record_estimates(estimates: RoundEstimate | GenerationEstimate) -> dict[str, dict[str, float | None]]:
    return {name: estimate._asdict() for name, estimate in estimates._asdict().items()}


def write_record(path: Path, study: Study, rows: Seq[Row]) -> None:
    """Write :func:`record` as JSON; UserInputError if the file cannot be written."""
    text = json.dumps(record(study, rows), indent=1, allow_nan=False) + "\n"

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_file(path, write)
