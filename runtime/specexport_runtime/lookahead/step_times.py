"""Cost curves as the tables that a round's decision needs, remembered from round to round."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.costs.curves import CostCurves
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
    """

    def __init__(self, curves: CostCurves) -> None:
        self.curves = curves
        self._tables: dict[tuple[object, ...], list[float]] = {}

    @staticmethod
    def context(load: StepLoad) -> int:
        """The context of a step as far as tables tell it apart."""
        return load.kv_entries // (load.num_rows * _BUCKET)

    def target(self, load: StepLoad, drafted: int, most: int) -> list[float]:
        """Seconds of the target's step with 0, 1, … ``most`` (or more) draft tokens besides ``drafted``."""
        rows, tokens = load.num_rows, load.num_tokens + drafted
        context = self.context(load)
        table = self._table((tokens, rows, context))
        entries = (context + 0.5) * rows * _BUCKET
        while len(table) <= most:
            table.append(self.curves.target.seconds(tokens + len(table), rows, entries))
        return table

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
        table = self._table((drafter, key, context))
        if not table:
            table.append(0.0)
        while len(table) <= most:
            rows = len(table)
            table.append(cost.seconds(key, rows, (context + 0.5) * rows * _BUCKET))
        return table

    def _table(self, key: tuple[object, ...]) -> list[float]:
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = []
        return table
