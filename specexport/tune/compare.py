"""Which of several drafts is the best one: by tokens/s in each circumstance, and over all of them."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from statistics import geometric_mean
from typing import Any, NamedTuple

from specexport.tune.table import TuneCell
from specexport_runtime.drafters.base import HEAD
from specexport_runtime.drafters.model import DRAFT_MODEL

OWN_DRAFTERS = frozenset({DRAFT_MODEL, HEAD})


class CellPick(NamedTuple):
    """The best draft at one batch size and context.

    Attributes:
        batch_size: sequences decoded at a time.
        context: prompt length, tokens.
        bundle: whose draft; None where plain decoding is faster than every draft.
        lookahead: the K that it is fastest with; 0 for plain decoding.
        tokens_per_second: with this K.
        speedup: over plain decoding.
    """

    batch_size: int
    context: int
    bundle: str | None
    lookahead: int
    tokens_per_second: float
    speedup: float


class Pick(NamedTuple):
    """The best draft.

    Attributes:
        bundle: whose draft has the largest speedup; None where plain decoding is faster than every draft everywhere.
        speedups: of each bundle, over plain decoding: geometric mean over the batch sizes and contexts, each at the K
            that is fastest there. Where that is 0 the draft is not used, and the speedup is 1.
        cells: the best draft of each batch size and context.
    """

    bundle: str | None
    speedups: Mapping[str, float]
    cells: tuple[CellPick, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "bundle": self.bundle,
            "speedups": dict(self.speedups),
            "cells": [cell._asdict() for cell in self.cells],
        }


def pick_draft(measured: Mapping[str, Seq[TuneCell]]) -> Pick:
    """Compare draft models and heads. Of equal ones the first counts.

    Args:
        measured: what was measured, by the bundles' names: the same batch sizes and contexts of each.
    """
    cells = {name: [cell for cell in found if cell.drafter in OWN_DRAFTERS] for name, found in measured.items()}
    speedups = {name: geometric_mean(cell.speedup for cell in found) for name, found in cells.items()}
    picks = tuple(_pick_cell(dict(zip(cells, each, strict=True))) for each in zip(*cells.values(), strict=True))
    drafts = [name for name, found in cells.items() if any(cell.lookahead for cell in found)]
    return Pick(max(drafts, key=speedups.__getitem__, default=None), speedups, picks)


def _pick_cell(cells: Mapping[str, TuneCell]) -> CellPick:
    name, cell = max(cells.items(), key=lambda item: item[1].speedup if item[1].lookahead else 0.0)
    rate = cell.tokens_per_second[cell.lookahead]
    return CellPick(cell.batch_size, cell.context, name if cell.lookahead else None, cell.lookahead, rate, cell.speedup)


def describe_pick(pick: Pick) -> str:
    """One line: the pick, and the speedups of all."""
    others = [f"{name} {speedup:.2f}×" for name, speedup in pick.speedups.items() if name != pick.bundle]
    if pick.bundle is None:
        return "pick: plain decoding, no draft is faster at any batch size and context"
    return f"pick: {pick.bundle} ({'; '.join([f'{pick.speedups[pick.bundle]:.2f}× plain', *others])})"
