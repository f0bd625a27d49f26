"""A comparison as a table on the terminal, and as plain values."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specexport.debug.compare import Comparison

if TYPE_CHECKING:
    from rich.table import Table


def to_json(found: Comparison) -> dict[str, Any]:
    """The comparison as plain values; infinite and undefined numbers become null."""
    data = asdict(found)
    for record in (data, *data["rows"]):
        for key, value in record.items():
            if isinstance(value, float) and not abs(value) < float("inf"):
                record[key] = None
    return data


def make_table(found: Comparison, top: int) -> "Table":
    """The layers that do most to the logits, at most ``top`` of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("layer", no_wrap=True)
    for name in ("KL alone", "share", "own error", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [found.row(label) for label in found.ranking]
    total = sum(row.divergence or 0.0 for row in rows)
    for row in rows[:top]:
        effect = row.divergence or 0.0
        share = f"{effect / total:.1%}" if total > 0 else "-"
        own = "-" if row.own_error is None else f"{row.own_error:.2e}"
        table.add_row(row.label, f"{effect:.2e}", share, own, f"{row.error:.2e}")
    return table


def summary_lines(found: Comparison, top: int) -> Iterator[str]:
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
