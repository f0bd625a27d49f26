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
    """The best draft at one batch size and context."""

    batch_size: int  # sequences decoded at a time
    context: int  # prompt length, tokens
    bundle: str | None  # of the draft; None where plain decoding is faster than every draft
    lookahead: int  # the K chosen for it; 0 for plain decoding
    tokens_per_second: float  # with this K
    speedup: float  # over plain decoding


class Pick(NamedTuple):
    """The best draft."""

    # of the draft with the largest speedup; None where plain decoding is faster than every draft everywhere
    bundle: str | None
    # of each bundle, over plain decoding: geometric mean over the batch sizes and contexts, each at the K chosen there.
    # Where that is 0 the draft is not used, and the speedup is 1.
    speedups: Mapping[str, float]
    cells: tuple[CellPick, ...]  # the best draft of each batch size and context

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "bundle": self.bundle,
            "speedups": dict(self.speedups),
            "cells": [cell._asdict() for cell in self.cells],
        }


def pick_draft(measured: Mapping[str, Seq[TuneCell]]) -> Pick:
    """Compare draft models and heads; of equal ones the first counts.

    ``measured`` holds the same batch sizes and contexts for each bundle, by its name.
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
