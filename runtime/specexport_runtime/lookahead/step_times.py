"""Cost curves as the tables that a round's decision needs, remembered from round to round.

What was learned about the curves (:mod:`specexport_runtime.costs.learned`) is in the tables already.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.lookahead.draft_cost import DraftCost
from specexport_runtime.sequences.records import StepLoad

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

_BUCKET = 64  # cache entries a row that count as the same context
_MAX_TABLES = 1024


class StepTimeTables:
    """Tables of seconds by number of tokens or rows, at the context of a step.

    Args:
        curves: what steps cost.
        learned: by what they are mended.
    """

    def __init__(self, curves: CostCurves, learned: LearnedCosts) -> None:
        self.curves, self.learned = curves, learned
        self._tables: dict[tuple[object, ...], list[float]] = {}

    @staticmethod
    def context(load: StepLoad) -> int:
        """The context of a step as far as tables tell it apart."""
        return load.kv_entries // (load.num_rows * _BUCKET)

    def forget(self) -> None:
        """What was learned has changed."""
        self._tables.clear()

    def target(self, load: StepLoad, drafted: int, most: int) -> list[float]:
        """Seconds of the target's step with 0, 1, … ``most`` (or more) draft tokens besides ``drafted``."""
        context = self.context(load)
        table = self._table((load.num_tokens, drafted, load.num_rows, context))
        if len(table) <= most:
            plain, ratio = self.with_drafts(load, 0), self.learned.extra_ratio(load.num_rows)
            while len(table) <= most:
                whole = self.with_drafts(load, drafted + len(table))
                table.append(plain + ratio * (whole - plain))
        return table

    def with_drafts(self, load: StepLoad, drafted: int) -> float:
        """Seconds of the target's step with ``drafted`` draft tokens, as the curve says."""
        entries = (self.context(load) + 0.5) * load.num_rows * _BUCKET
        return self.curves.target.seconds(load.num_tokens + drafted, load.num_rows, entries)

    def draft(
        self, drafter: str, cost: DraftCost, sequences: "Seq[Sequence]", load: StepLoad, most: int
    ) -> list[float]:
        """Seconds of one draft step with 0 (none at all), 1, … ``most`` (or more) rows.

        Args:
            drafter: its name.
            cost: what its steps cost.
            sequences: who may draft.
            load: the step.
            most: rows.
        """
        context, key = self.context(load), cost.key(sequences)
        table = self._table((drafter, key, context, load.num_rows))
        if not table:
            table.append(0.0)
        ratio = self.learned.draft_ratio(drafter, load.num_rows)
        while len(table) <= most:
            rows = len(table)
            table.append(ratio * cost.seconds(key, rows, (context + 0.5) * rows * _BUCKET))
        return table

    def draft_steps(
        self, drafter: str, cost: DraftCost, sequences: "Seq[Sequence]", load: StepLoad, rows: Seq[int]
    ) -> float:
        """Seconds of draft steps of so many rows each, as the curve says.

        Args:
            drafter: its name.
            cost: what its steps cost.
            sequences: who drafted.
            load: the step.
            rows: of each draft step.
        """
        table = self.draft(drafter, cost, sequences, load, max(rows, default=0))
        return sum([table[count] for count in rows]) / self.learned.draft_ratio(drafter, load.num_rows)

    def _table(self, key: tuple[object, ...]) -> list[float]:
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = []
        return table
