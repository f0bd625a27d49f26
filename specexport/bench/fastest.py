"""The fastest K of each method, and the best draft of several bundles."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from statistics import geometric_mean
from typing import Any, NamedTuple

from specexport.bench.methods import OWN_DRAFTERS, Cell
from specexport.bench.summary import Summary

TOLERANCE = 0.01
"""The smallest K within this share of the fastest is chosen: a longer draft must be worth it."""


def choose_lookahead(rates: Mapping[int, float]) -> int:
    """The smallest K whose tokens/s are within ``TOLERANCE`` of the best."""
    best = max(rates.values())
    return min(k for k, rate in rates.items() if rate >= best * (1 - TOLERANCE))


class Fastest(NamedTuple):
    """One method in one place: at one batch size, context, domain, temperature and way of batching."""

    cell: Cell  # with a K of 0
    rows: Mapping[int, Summary]  # of every K that was measured; 0 is plain decoding

    @property
    def rates(self) -> dict[int, float]:
        """Tokens/s of the rounds; of whole runs where every text ended with its first token."""
        return {k: row.decode_tokens_per_second or row.tokens_per_second for k, row in sorted(self.rows.items())}

    @property
    def lookahead(self) -> int:
        """The chosen K; 0 where plain decoding is faster than every draft."""
        return choose_lookahead(self.rates)

    @property
    def speedup(self) -> float:
        """Of the chosen K over plain decoding."""
        return self.rates[self.lookahead] / self.rates[0]

    @property
    def drafting(self) -> Summary:
        """The chosen K; where that is 0 the fastest that drafts: its rounds say why it is not chosen."""
        return self.rows[self.lookahead or max(filter(None, self.rows), key=self.rates.__getitem__)]

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        rates = {str(k): rate for k, rate in self.rates.items()}
        chosen = {"num_speculative_tokens": self.lookahead, "speedup": self.speedup}
        return self.cell._asdict() | chosen | {"decode_tokens_per_second": rates}


def find_fastest(rows: Seq[Summary]) -> list[Fastest]:
    """Of each method with several values of K, and of every bundle that is compared, in each place."""
    plain = {row.cell: row for row in rows if row.cell.drafter == "none"}
    tried: dict[Cell, dict[int, Summary]] = {}
    for row in rows:
        k, base = row.cell.num_speculative_tokens, plain.get(row.cell.plain)
        if k > 0 and base is not None:
            tried.setdefault(row.cell._replace(num_speculative_tokens=0), {0: base})[k] = row
    return [Fastest(cell, found) for cell, found in tried.items() if len(found) > 2 or cell.bundle]


class Pick(NamedTuple):
    """The best draft."""

    # of the draft with the largest speedup; None where plain decoding is faster than every draft everywhere
    bundle: str | None
    # of each bundle, over plain decoding: geometric mean over all places, each at the K chosen there. Where that is 0
    # the draft is not used, and the speedup is 1.
    speedups: Mapping[str, float]

    def describe(self) -> str:
        """One line: the pick, and the speedups of all."""
        if self.bundle is None:
            return "pick: plain decoding, no draft is faster anywhere"
        others = [f"{name} {speedup:.2f}×" for name, speedup in self.speedups.items() if name != self.bundle]
        return f"pick: {self.bundle} ({'; '.join([f'{self.speedups[self.bundle]:.2f}× plain', *others])})"


def pick_draft(found: Seq[Fastest]) -> Pick | None:
    """Compare bundles by their draft models and heads; of equal ones the first counts. None for a single bundle."""
    own: dict[str, list[Fastest]] = {}
    for each in found:
        if each.cell.bundle and each.cell.method in OWN_DRAFTERS:
            own.setdefault(each.cell.bundle, []).append(each)
    if not own:
        return None
    speedups = {name: geometric_mean(each.speedup for each in of_one) for name, of_one in own.items()}
    drafting = [name for name, of_one in own.items() if any(each.lookahead for each in of_one)]
    return Pick(max(drafting, key=speedups.__getitem__, default=None), speedups)
