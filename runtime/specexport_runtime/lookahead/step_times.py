"""Cost curves as the tables that a round's decision needs, remembered from round to round."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.sequences.records import StepLoad

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

_BUCKET = 64  # cache entries a row that count as the same context
_MAX_TABLES = 1024
_USUAL_BACKLOG = 2
_LIKELY_SHARE = 2 / 3  # of the layers, in a draft whose layers were not chosen yet


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

    def draft(self, drafter: str, sequences: "Seq[Sequence]", load: StepLoad, most: int) -> list[float]:
        """Seconds of one draft step with 0 (none at all), 1, … ``most`` (or more) rows.

        Args:
            drafter: ``"draft-model"`` or ``"self"``.
            sequences: who may draft; of ``"self"`` their choice of layers counts.
            load: the step.
            most: rows.
        """
        context = self.context(load)
        layers = self._layers(sequences) if drafter == "self" else (0, 0, 0)
        table = self._table((drafter, layers, context))
        if not table:
            table.append(0.0)
        while len(table) <= most:
            rows = len(table)
            entries = (context + 0.5) * rows * _BUCKET
            if drafter == "self":
                table.append(self._self_seconds(layers, rows, entries))
            else:
                table.append(self.curves.drafters[drafter].seconds(rows, rows, entries))
        return table

    def catch_up(self, drafter: str, backlog: int) -> float:
        """Seconds that a drafter with a cache of its own needs for reading what it has missed, besides the usual.

        Args:
            drafter: its name.
            backlog: tokens that it has not read; it always has one or two.
        """
        if backlog <= _USUAL_BACKLOG:
            return 0.0
        cost = self.curves.drafters[drafter]
        return max(cost.seconds(backlog, 1, backlog / 2) - cost.seconds(1, 1), 0.0)

    def _self_seconds(self, layers: tuple[int, int, int], rows: int, entries: float) -> float:
        """Sequences with different layers draft one after another."""
        attention, mlp, groups = layers
        groups = min(groups, rows)
        each = -(-rows // groups)
        return groups * self.curves.self_draft_seconds(attention, mlp, each, each, entries / groups)

    def _layers(self, sequences: "Seq[Sequence]") -> tuple[int, int, int]:
        """Attention layers and MLPs that are on, on average, and how many different choices there are."""
        choices = {seq.layer_choice for seq in sequences if seq.layer_choice is not None}
        if not choices:
            likely = 0 if self.curves.gates is None else round(_LIKELY_SHARE * self.curves.gates.num_layers)
            return likely, likely, 1
        attention = sum(sum(choice.attention) for choice in choices) / len(choices)
        mlp = sum(sum(choice.mlp) for choice in choices) / len(choices)
        groups = len({(choice.attention, choice.mlp) for choice in choices})
        return round(attention), round(mlp), groups

    def _table(self, key: tuple[object, ...]) -> list[float]:
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = []
        return table
